"""One generate() call with a drafter: which loop takes it, its prefill, and its output."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..modeling.drafter import Drafter
from ..modeling.hybrid_cache import HybridCache
from ..modeling.sparse_moe import has_router
from ..modeling.split_forward import SplitForward
from ..modeling.taps import Taps
from ..modeling.target import split_obstacle, text_model
from .candidate_generator import HybridSpecCandidateGenerator
from .decoding import DecodingState, decode
from .device_call import DeviceCall, DeviceRun
from .draft_session import DraftSession
from .drafting_guard import GuardedSession, guarded
from .emission import Emission
from .length_policies import LengthPolicy, default_policy
from .outputs import HybridSpecGenerateOutput
from .round_engine import are_default
from .statistics import GenerationStatistics
from .verification import TokenVerifier

logger = logging.get_logger(__name__)

PATHS = ("auto", "graphs", "round", "host")


@dataclass(frozen=True)
class CallOptions:
    """What a call asks of us beside transformers' own arguments; None stands for the default.

    Attributes:
        named: those of our arguments that the call gives itself.
    """

    length_policy: LengthPolicy | None = None
    decoding_path: str = "auto"
    named: tuple[str, ...] = ()

    def __post_init__(self):
        if self.decoding_path not in PATHS:
            raise ValueError(f"decoding_path must be one of {', '.join(PATHS)}, got {self.decoding_path!r}.")

    def refuse_unused(self, is_plain: bool) -> None:
        """Raises ValueError if the call gives options that only a drafter obeys, although none drafts in it.

        Args:
            is_plain: whether tokens are decoded one by one, which the paths `graphs` and `host` do as well.
        """
        if is_plain and self.named == ("decoding_path",) and self.decoding_path != "round":
            return
        if self.named:
            raise ValueError(
                f"{' and '.join(self.named)} would have no effect: no drafter drafts in this call. Pass "
                "assistant_model=AutoDrafter.from_pretrained(...), or leave it out."
            )


@dataclass
class AssistedCall:
    """The parts of one call; `run_rounds` is our loop, `candidate_generator` serves the host's."""

    model: PreTrainedModel
    drafter: Drafter
    cache: HybridCache
    options: CallOptions
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    streamer: BaseStreamer | None
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None

    def __post_init__(self):
        is_sparse = any(has_router(layer.mlp) for layer in text_model(self.model).layers)
        self.policy = self.options.length_policy or default_policy(is_sparse, self.drafter.num_draft_tokens)
        self.policy.check(self.model, self.drafter)
        path, reason = self._choose_path()
        self.statistics = GenerationStatistics(path, self.policy.name, reason)
        num_padding = 0 if self.attention_mask is None else int((self.attention_mask == 0).sum())
        session = DraftSession(self.drafter, self.cache, num_padding)
        self.drafting = guarded(session, self.policy, self.model.device)
        self.candidate_generator = HybridSpecCandidateGenerator(
            self.drafting,
            self.cache,
            self.policy,
            self.stopping_criteria,
            self.generation_config.max_length,
            self.statistics,
        )

    def taps(self, on_features) -> Taps:
        """Hands the tapped features of the target's own forwards to `on_features`."""
        return Taps(text_model(self.model), self.drafter.target_layer_ids, on_features)

    def run_rounds(self, input_ids: torch.Tensor, model_kwargs: dict):
        """Prefills and decodes in rounds; returns what generate() returns."""
        emission = Emission(input_ids, self.stopping_criteria, self.generation_config, self.streamer)
        verifier = TokenVerifier(self.logits_processor, self.generation_config.do_sample)
        with ExitStack() as stack:
            device_run = self._device_run(stack, emission)
            with self.taps(self.drafting.observe):
                outputs = self.model._prefill(input_ids, self.generation_config, dict(model_kwargs))
            first = verifier.verify(input_ids, input_ids.new_empty(0), outputs.logits[0, -1:])
            del outputs
            emission.append(first, emission.admit(first))
            is_guarded = isinstance(self.drafting, GuardedSession)
            session = self.drafting.session if is_guarded else self.drafting
            if device_run is not None and (obstacle := device_run.context_obstacle(session)):
                device_run = self._without_graphs(obstacle)
            if device_run is None:
                self._decode(emission, verifier)
            else:
                guard = self.drafting.guard if is_guarded else None
                device_run.decode(self._device_call, emission, self.statistics, verifier.uniforms, session, guard)
        emission.end()
        return self._output(emission)

    def _decode(self, emission: Emission, verifier: TokenVerifier) -> None:
        decode(
            DecodingState(
                SplitForward(
                    text_model(self.model), self.model.get_output_embeddings(), self.drafter.target_layer_ids
                ),
                self.cache,
                self.drafting,
                self.policy,
                verifier,
                emission,
                self.statistics,
                self.position_ids[..., -1:] + 1,
                self.attention_mask,
            )
        )

    @property
    def _device_call(self) -> DeviceCall:
        return DeviceCall(
            self.model,
            self.drafter,
            self.policy,
            self.cache,
            self.logits_processor,
            self.generation_config,
            self.attention_mask,
            self.position_ids,
        )

    def _device_run(self, stack: ExitStack, emission: Emission) -> DeviceRun | None:
        """An engine for the call, or None if it stays with eager rounds."""
        wanted = self.options.decoding_path
        if wanted == "round" or (wanted == "auto" and not are_default(self.model.device)):
            return None
        run = self._device_call.reserve(stack, emission)
        if isinstance(run, DeviceRun):
            self.statistics.path = "graphs"
            return run
        return self._without_graphs(run)

    def _without_graphs(self, reason: str) -> None:
        """Notes why rounds are eager; raises ValueError if the call insists on graphs."""
        if self.options.decoding_path == "graphs":
            raise ValueError(
                f"decoding_path='graphs' cannot serve this call: {reason}. Use 'auto', 'round' or 'host'."
            )
        self.statistics.path, self.statistics.reason = "round", reason
        if self.model.device.type == "cuda":
            logger.warning_once(f"Rounds are not captured into graphs: {reason}.")

    def _output(self, emission: Emission):
        if not self.generation_config.return_dict_in_generate:
            return emission.input_ids
        return HybridSpecGenerateOutput(
            sequences=emission.input_ids,
            scores=emission.scores,
            logits=emission.logits,
            cache=self.cache,
            statistics=self.statistics,
        )

    def _choose_path(self) -> tuple[str, str]:
        """The loop that takes this call, and why it is the host's."""
        reason = self._round_obstacle()
        wanted = self.options.decoding_path
        if wanted == "host":
            return "host", "asked for by decoding_path='host'"
        if reason is None:
            return "round", ""
        if wanted in ("round", "graphs"):
            raise ValueError(f"decoding_path={wanted!r} cannot serve this call: {reason}. Use 'auto' or 'host'.")
        logger.warning_once(f"This call is decoded in transformers' own loop: {reason}.")
        return "host", reason

    def _round_obstacle(self) -> str | None:
        config = self.generation_config
        if config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions):
            return "hidden states or attentions are to be returned"
        return split_obstacle(self.model)


def draft_after_prefill(generator: CandidateGenerator) -> CandidateGenerator:
    """Lets a stock generator propose nothing with the prefill, whose rows cannot be taken back. Returns it."""
    get_candidates, update = generator.get_candidates, generator.update_candidate_strategy
    is_prefilled = False

    def get_candidates_after_prefill(input_ids, **kwargs):
        if not is_prefilled and not kwargs:
            return input_ids, None
        if type(generator) is AssistedCandidateGenerator and "cache" not in generator.assistant_kwargs:
            _cover(generator, input_ids.shape[1])
        return get_candidates(input_ids, **kwargs)

    def update_after_prefill(*args, **kwargs):
        nonlocal is_prefilled
        if is_prefilled or generator.requires_model_outputs:
            update(*args, **kwargs)
        is_prefilled = True

    generator.get_candidates, generator.update_candidate_strategy = get_candidates_after_prefill, update_after_prefill
    return generator


def _cover(generator: AssistedCandidateGenerator, length: int) -> None:
    """Extends the inputs that an assistant was given with the prompt to the token that it now has in addition."""
    config, inputs = generator.assistant_model.config, generator.assistant_kwargs
    is_encoder_decoder = config.is_encoder_decoder
    position_ids = inputs.get("position_ids")
    if position_ids is not None and position_ids.ndim == 3 and config.get_text_config() is config:
        # Of the positions of a vision-language target, a text model knows the first row.
        inputs["position_ids"] = position_ids[0]
    inputs = _prepare_attention_mask(inputs, length, is_encoder_decoder)
    inputs = _prepare_position_ids(inputs, length, is_encoder_decoder)
    generator.assistant_kwargs = _prepare_token_type_ids(inputs, length)
