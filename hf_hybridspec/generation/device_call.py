"""One generate() call decoded on fixed buffers: whether it can be, its engine, and its rounds."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging

from ..kernels.round_steps import MAX_ROWS
from ..modeling.drafter import Drafter
from ..modeling.hybrid_cache import HybridCache
from .conditional_graphs import GraphError
from .device_round import MAX_STOP_TOKENS, Acceptance
from .draft_session import DraftSession
from .drafting_guard import DraftingGuard
from .emission import Emission
from .policy_base import DeviceLengthPolicy, LengthPolicy
from .round_engine import RoundEngine, engine_for, engine_obstacle
from .round_loop import HostSide, Launches, run_admitted, run_ahead
from .sampling_plan import SamplingPlan
from .statistics import GenerationStatistics
from .verification import UniformStream

logger = logging.get_logger(__name__)


@dataclass
class Engines:
    """The engines of one attached model.

    Attributes:
        failed_capacity: the smallest number of rows for which none could be made; larger ones are not tried again.
    """

    engines: list[RoundEngine] = field(default_factory=list)
    failed_capacity: int | None = None

    def __reduce__(self):
        # A copy of the model has weights of its own.
        return (Engines, ())


@dataclass(frozen=True)
class DeviceCall:
    """What of a call decides whether it runs on fixed buffers.

    Attributes:
        drafter, policy: None for plain decoding.
        position_ids: `[..., 1, n]` of the prompt.
    """

    model: PreTrainedModel
    drafter: Drafter | None
    policy: LengthPolicy | None
    cache: Cache
    logits_processor: LogitsProcessorList
    generation_config: GenerationConfig
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None

    def obstacle(self, emission: Emission) -> str | None:
        """Why the call cannot run on fixed buffers, as the rest of a sentence, or None."""
        config = self.generation_config
        # The model first: it is what most often stands in the way.
        if obstacle := engine_obstacle(self.model, self.drafter):
            return obstacle
        if isinstance(plan := self._plan(), str):
            return plan
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            return "scores or logits are to be returned"
        if len(emission.stop_tokens) > MAX_STOP_TOKENS:
            return f"there are {len(emission.stop_tokens)} EOS tokens, at most {MAX_STOP_TOKENS} are watched"
        return self._cache_obstacle(emission) or self._position_obstacle() or self._policy_obstacle()

    def reserve(self, stack: ExitStack, emission: Emission) -> "DeviceRun | str":
        """An engine with all that the call needs, its own until `stack` closes, or why it cannot have one."""
        if obstacle := self.obstacle(emission):
            return obstacle
        engines: Engines = self.model._hybridspec.engines
        capacity = self._rows(emission) + MAX_ROWS
        if engines.failed_capacity is not None and capacity >= engines.failed_capacity:
            return "an earlier call found no room for the graphs"
        engine = None
        try:
            # Buffers outlive the call, and tensors of inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                engine = engine_for(self.model, engines.engines, self.drafter, capacity)
                if not stack.enter_context(engine.reserved()):
                    return "another call is using the buffers"
                acceptance = engine.acceptance(self._plan())
                launches, commits = engine.prepare(self.policy, acceptance, not emission.needs_host)
        except (torch.OutOfMemoryError, GraphError) as error:
            engines.failed_capacity = capacity
            engines.engines[:] = [other for other in engines.engines if other is not engine]
            return f"the rounds could not be captured ({error})"
        return DeviceRun(engine, acceptance, launches, commits)

    def _plan(self) -> SamplingPlan | str:
        return SamplingPlan.of(self.logits_processor, bool(self.generation_config.do_sample))

    def _rows(self, emission: Emission) -> int:
        """Rows of the cache when the sequence has reached its limit."""
        rows = self.attention_mask.shape[1] if self.attention_mask is not None else emission.input_ids.shape[1]
        return max(rows, int(self.cache.get_seq_length()) + 1) + emission.remaining

    def _cache_obstacle(self, emission: Emission) -> str | None:
        if type(self.cache) not in (HybridCache, DynamicCache, StaticCache) or self.cache.offloading:
            return f"the cache is a {type(self.cache).__name__}"
        if any(getattr(layer, "record_past", False) for layer in self.cache.layers):
            return "the cache records its past"
        slots = self.cache.get_max_length()
        if 0 <= slots < self._rows(emission) - 1:
            return f"the cache has {slots} slots only"
        return None

    def _position_obstacle(self) -> str | None:
        if self.attention_mask is not None and not bool(self.attention_mask.all()):
            return "the prompt is padded"
        if self.position_ids is None:
            return "the positions are not known"
        last = self.position_ids[..., -1].flatten()
        # Of four rows, the first counts text and is not rotated by.
        if last[-3:].unique().numel() != 1:
            return "the prompt ends in an image"
        return None

    def _policy_obstacle(self) -> str | None:
        policy = self.policy
        if self.drafter is None:
            return None
        if not isinstance(policy, DeviceLengthPolicy) or not policy.decides_on_device or policy.lookahead > 1:
            return f"the length policy {policy.name!r} decides on the host"
        return None


@dataclass(frozen=True)
class DeviceRun:
    """A reserved engine, ready for a call's rounds.

    Attributes:
        commits: by verification length, where the host decides how much is committed; else empty.
    """

    engine: RoundEngine
    acceptance: Acceptance
    launches: Launches
    commits: dict[int, Callable[[], None]]

    def context_obstacle(self, session: DraftSession) -> str | None:
        """Why the drafter cannot go on from its context on fixed buffers, as the rest of a sentence, or None."""
        return self.engine.context_obstacle(session.context)

    def decode(
        self,
        call: DeviceCall,
        emission: Emission,
        statistics: GenerationStatistics,
        uniforms: UniformStream | None,
        session: DraftSession | None = None,
        guard: DraftingGuard | None = None,
    ) -> None:
        """Emits until the sequence ends, from the prefill's token on; then brings cache and session up to date.

        Args:
            uniforms: the stream that the prefill's token was drawn from; None for greedy decoding.
        """
        if emission.is_finished:
            return
        if uniforms is not None:
            self.acceptance.seed.fill_(uniforms.seed)
        next_position = int(call.position_ids[..., -1].flatten()[-1]) + 1
        context = None if session is None else session.context
        self.engine.begin(call.cache, context, emission, next_position)
        host = HostSide(self.engine.rounds, emission, statistics, guard)
        if self.commits:
            run_admitted(host, self.launches, lambda length: self.commits[length]())
        else:
            run_ahead(host, self.launches)
        self.engine.end(call.cache, session)
