"""Fixed buffers of one target and drafter, and the rounds over them; calls come and go.

A call copies its cache in after the prefill and out at the end, so that caches stay the user's and nothing else is
shared between calls.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..kernels.dispatch import resolve
from ..modeling.block_buffers import BlockBuffers
from ..modeling.block_state import BlockState
from ..modeling.dflash import DFlashDrafter
from ..modeling.draft_context import DraftContext
from ..modeling.drafter import Drafter
from ..modeling.dspark import DSparkDrafter
from ..modeling.fused_drafter import FusedDrafter, fused_drafter_obstacle
from ..modeling.fused_forward import FusedForward
from ..modeling.fused_obstacle import fused_target_obstacle
from ..modeling.hybrid_cache import HybridCache
from ..modeling.ready import ReadyDrafter
from ..modeling.target import text_model
from ..modeling.verification_backends import block_buffers_class
from .cache_copies import copy_in, copy_out, weights_signature
from .conditional_graphs import conditional_graph_obstacle
from .device_round import Acceptance, DeviceRound, GreedyAcceptance, RoundParts, SampledAcceptance
from .draft_session import DraftSession
from .emission import Emission
from .policy_base import DeviceLengthPolicy
from .round_graphs import EagerRounds, RoundGraphs
from .round_loop import Launches
from .sampling_plan import SamplingPlan

FUSED_DRAFTERS = (DFlashDrafter, DSparkDrafter, ReadyDrafter)
# Rows of the smallest buffers; larger ones double. A sequence that fits an engine needs no new one.
SMALLEST_CAPACITY = 4096

# Whether rounds on fixed buffers may run step by step where graphs cannot: for tests.
_allows_eager: ContextVar[bool] = ContextVar("hybridspec_eager_device_rounds", default=False)


@contextmanager
def eager_device_rounds() -> Iterator[None]:
    """Lets calls in the enclosed code take fixed buffers on any device, with rounds that run step by step."""
    token = _allows_eager.set(True)
    try:
        yield
    finally:
        _allows_eager.reset(token)


def are_default(device: torch.device) -> bool:
    """Whether `decoding_path="auto"` takes rounds on fixed buffers on such a device, where nothing forbids them."""
    return device.type == "cuda" or _allows_eager.get()


def engine_obstacle(model: PreTrainedModel, drafter: Drafter | None) -> str | None:
    """Why rounds of this pair cannot run on fixed buffers, as the rest of a sentence, or None."""
    device = model.device
    if not _allows_eager.get():
        if obstacle := conditional_graph_obstacle(device):
            return obstacle
        if resolve(device) != "triton":
            return "the reference kernels read lengths on the host"
    if block_buffers_class() is not BlockBuffers:
        return "another verification of the GDN layers was asked for"
    if obstacle := fused_target_obstacle(model):
        return obstacle
    return None if drafter is None else drafter_obstacle(drafter)


def drafter_obstacle(drafter: Drafter) -> str | None:
    """Why a bound drafter cannot draft on fixed buffers, as the rest of a sentence, or None."""
    if type(drafter) not in FUSED_DRAFTERS:
        return f"a {type(drafter).__name__} may draft in its own way"
    return fused_drafter_obstacle(drafter)


class RoundEngine:
    """Buffers, steps and graphs of one target with one drafter, or none.

    Args:
        capacity: rows that a sequence may have in the cache.
        executor: runs the programs, captured or step by step.

    Attributes:
        rounds: the device round; its state is of the sequence under way.

    Raises:
        torch.OutOfMemoryError: the device has no room for the buffers.
    """

    def __init__(
        self, model: PreTrainedModel, drafter: Drafter | None, capacity: int, executor: RoundGraphs | EagerRounds
    ):
        self.capacity = capacity
        self._executor = executor
        self._forward = FusedForward(model, () if drafter is None else drafter.target_layer_ids)
        self._block = BlockState(_prefilled_cache(model, capacity))
        self._fused_drafter = None if drafter is None else FusedDrafter(drafter, capacity)
        self._drafter = None if drafter is None else weakref.ref(drafter)
        self._block_size = 0 if drafter is None else drafter.block_size
        self._drafter_weights = () if drafter is None else weights_signature(drafter)
        self._blank = None if drafter is None else _blank_context(drafter)
        states = self._block.select_states(() if drafter is None else drafter.recurrent_layer_ids)
        parts = RoundParts(self._forward, self._block, capacity, self._fused_drafter, states)
        self.rounds = DeviceRound(parts, model.device)
        self._device = model.device
        self._acceptances: dict[tuple[bool, bool], Acceptance] = {}
        self._lock = threading.Lock()

    def serves(self, drafter: Drafter | None, capacity: int) -> bool:
        """Whether a call with this drafter and so many rows can use the engine."""
        return self.is_of(drafter) and capacity <= self.capacity and self.is_current

    def is_of(self, drafter: Drafter | None) -> bool:
        """Whether the engine was made for this drafter, or for none."""
        return drafter is (None if self._drafter is None else self._drafter())

    @property
    def is_current(self) -> bool:
        """Whether the models still are what the steps were made of."""
        if not self._forward.weights.is_current:
            return False
        if self._drafter is None:
            return True
        drafter = self._drafter()
        is_alive = drafter is not None and drafter.block_size == self._block_size
        return is_alive and weights_signature(drafter) == self._drafter_weights

    @contextmanager
    def reserved(self) -> Iterator[bool]:
        """Gives whether the buffers are this call's until the block ends; if not, another call is using them."""
        is_reserved = self._lock.acquire(blocking=False)
        try:
            yield is_reserved
        finally:
            if is_reserved:
                self._lock.release()

    # --- One call -----------------------------------------------------------------------------------------------

    def acceptance(self, plan: SamplingPlan) -> Acceptance:
        """How this call accepts tokens; `seed` comes with the first token."""
        kind = (plan.do_sample, plan.is_filtered)
        if kind not in self._acceptances:
            accepts = SampledAcceptance(self._device, plan.is_filtered) if plan.do_sample else GreedyAcceptance()
            self._acceptances[kind] = accepts
        acceptance = self._acceptances[kind]
        if plan.do_sample:
            acceptance.settings.set(plan.temperature, plan.top_k, plan.top_p, plan.min_p)
        return acceptance

    def prepare(
        self, policy: DeviceLengthPolicy | None, acceptance: Acceptance, commits: bool
    ) -> tuple[Launches, dict[int, Callable[[], None]]]:
        """What runs rounds, and the commits of each length if they are left to the host. Captures what is missing.

        Raises:
            torch.OutOfMemoryError, GraphError: the rounds cannot be captured.
        """
        rounds, prepare = self.rounds, self._executor.prepare
        self._rewind()
        drafting = None
        longest = 1
        if self._fused_drafter is not None:
            drafting = prepare(rounds.drafting_program(policy, acceptance, commits))
            longest = policy.longest(self._fused_drafter.num_draft_tokens)
        launches = Launches(drafting, prepare(rounds.plain_program(acceptance, commits)))
        lengths = () if commits else range(1, longest + 1)
        return launches, {length: prepare(rounds.commit_program(length, acceptance)) for length in lengths}

    def context_obstacle(self, context: DraftContext) -> str | None:
        """Why `begin` would refuse a drafter's context, as the rest of a sentence, or None."""
        return self._fused_drafter.context_obstacle(context)

    def begin(self, cache: Cache, context: DraftContext | None, emission: Emission, next_position: int) -> None:
        """Starts a sequence whose prefill has filled `cache` and `context`, both read only.

        Args:
            emission: its newest token is the prefill's.
            next_position: that token's position.
        """
        self._synchronize()
        copy_in(self._block, cache)
        if context is not None:
            self._fused_drafter.begin(context)
        offset = next_position - int(cache.get_seq_length())
        self.rounds.start(int(emission.anchor), emission.remaining, emission.stop_tokens, offset)

    def end(self, cache: Cache, session: DraftSession | None) -> None:
        """Brings cache and drafter context of `begin` up to what was committed since."""
        self._synchronize()
        num_rows = copy_out(self._block, cache)
        if session is not None:
            self._fused_drafter.end(session.context)
            session.skip(num_rows)

    def _rewind(self) -> None:
        """Before steps run to be captured: they write after what the buffers count as committed."""
        self._synchronize()
        self._block.committed.zero_()
        if self._fused_drafter is not None:
            self._fused_drafter.begin(self._blank)

    def _synchronize(self) -> None:
        # Rounds launched ahead by a call that failed may still be under way.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _prefilled_cache(model: PreTrainedModel, capacity: int) -> HybridCache:
    """A static cache whose layers have their tensors: one token has been through the target."""
    cache = HybridCache(model.config, capacity)
    with torch.no_grad():
        text_model(model)(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), cache=cache)
    return cache


@torch.no_grad()
def _blank_context(drafter: Drafter) -> DraftContext:
    """A context of one row of nothing."""
    context = drafter.new_context()
    width = len(drafter.target_layer_ids) * drafter.config.hidden_size
    features = torch.zeros(1, width, dtype=drafter.compute_dtype, device=drafter.compute_device)
    drafter.observe(context, features, torch.zeros(1, dtype=torch.int64, device=features.device))
    return context


def engine_for(model: PreTrainedModel, engines: list, drafter: Drafter | None, capacity: int) -> RoundEngine:
    """The engine that serves such a call, from `engines` or new; engines that it replaces are dropped.

    Raises:
        torch.OutOfMemoryError: the device has no room for the buffers.
    """
    for engine in engines:
        if engine.serves(drafter, capacity):
            return engine
    engines[:] = [engine for engine in engines if engine.is_current and not engine.is_of(drafter)]
    executor = EagerRounds() if model.device.type != "cuda" else RoundGraphs(model.device)
    size = SMALLEST_CAPACITY
    while size < capacity:
        size *= 2
    engines.append(RoundEngine(model, drafter, size, executor))
    return engines[-1]
