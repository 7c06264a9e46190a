"""What a call of generate() asks for, and the refusals that come before anything has run."""

import inspect
from collections.abc import Callable

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.utils import logging

from ..modeling.hybrid_cache import HybridCache
from ..modeling.target import gated_delta_nets
from .cache_reuse import Resumption

logger = logging.get_logger(__name__)

# Options of transformers that size the drafts of its own assistants; a drafter's lengths come from its policy.
_HOST_DRAFT_OPTIONS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
)
# They advance with every call, also with the host loop's calls about drafts that are then rejected.
_STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
# Values of cache_implementation that become a HybridCache.
ROLLBACK_CACHES = (None, "dynamic", "hybrid", *ALL_STATIC_CACHE_IMPLEMENTATIONS)
_OTHER_ASSISTANTS = ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit")


def names_no_assistant(call: inspect.BoundArguments, defaults: GenerationConfig) -> bool:
    """Whether the call leaves the choice of an assistant to the model."""
    if call.arguments.get("assistant_model") is not None or call.arguments.get("custom_generate") is not None:
        return False
    asked = _asked(call, defaults)
    return not any(asked(name) for name in (*_OTHER_ASSISTANTS, "is_assistant"))


def drafting_obstacle(call: inspect.BoundArguments, defaults: GenerationConfig) -> str | None:
    """Why the attached drafter cannot serve a call that did not ask for it, or None."""
    asked = _asked(call, defaults)
    if (asked("num_beams") or 1) > 1 or (asked("num_return_sequences") or 1) > 1:
        return "it searches beams or returns several sequences"
    if asked("guidance_scale") not in (None, 1, 1.0) or asked("use_cache") is False:
        return "guidance_scale or use_cache=False needs plain decoding"
    if asked("cache_implementation") not in ROLLBACK_CACHES:
        return f"cache_implementation={asked('cache_implementation')!r} cannot be rolled back"
    kwargs = call.arguments.get("kwargs", {})
    given = (call.arguments.get("inputs"), kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    if any(tensor is not None and tensor.shape[0] > 1 for tensor in given):
        return "it holds several sequences"
    return None


def refuse_host_draft_options(call: inspect.BoundArguments, defaults: GenerationConfig) -> None:
    """Raises ValueError if a call with a drafter also names another assistant or sizes its drafts."""
    kwargs, asked = call.arguments.get("kwargs", {}), _asked(call, defaults)
    unused = [name for name in _HOST_DRAFT_OPTIONS if kwargs.get(name) is not None]
    unused += [name for name in _OTHER_ASSISTANTS if asked(name)]
    if unused:
        raise ValueError(
            f"{', '.join(unused)} would have no effect beside a drafter. Leave it out, and choose how much is "
            "verified with length_policy, such as length_policy='static:6'."
        )


def refuse_unsupported(generation_config: GenerationConfig) -> None:
    """Raises ValueError for options that assisted decoding would make wrong."""
    if generation_config.guidance_scale not in (None, 1, 1.0):
        raise ValueError(
            f"guidance_scale={generation_config.guidance_scale} cannot be combined with an assistant: its processor "
            "keeps a state of its own, which rejected tokens would corrupt. Leave out guidance_scale or the assistant."
        )
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError(
            "assistant_ensemble_weight mixes the drafter into the output, which would not be the target's. "
            "Leave it out."
        )


def warn_of_recurrent_assistant(assistant: PreTrainedModel | None) -> None:
    """Warns of an assistant with recurrent states that nothing takes back: its drafts go wrong with a rejected one."""
    if getattr(assistant, "_is_stateful", False):
        # The class's own name: an attached model passes none of this.
        next_step = "Call attach(assistant_model) as well" if gated_delta_nets(assistant) else "Choose another"
        logger.warning_once(
            f"The assistant model ({type(assistant).__name__}) keeps recurrent states, which are not taken back when "
            f"its drafts are rejected: the output stays right, but later drafts are poor. {next_step}."
        )


def refuse_stateful_processors(logits_processor: LogitsProcessorList) -> None:
    """Raises ValueError for processors that the host loop, which shows them rejected tokens, would make wrong."""
    for processor in logits_processor:
        if isinstance(processor, _STATEFUL_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} keeps a state of its own, which the host loop would corrupt "
                "with rejected tokens. Leave it out, or decode without an assistant."
            )


def refuse_prompt(input_ids: torch.Tensor, model_kwargs: dict, config: PreTrainedConfig) -> None:
    """Raises ValueError for a batch, an empty prompt, or one longer than the target's context."""
    embeds = model_kwargs.get("inputs_embeds")
    rows = input_ids.shape[0] if embeds is None else embeds.shape[0]
    if rows != 1:
        raise ValueError(
            f"Assisted decoding takes one sequence at a time, got a batch of {rows}. Call generate() for each."
        )
    length, longest = prompt_length(input_ids, model_kwargs), _context_length(config)
    if length == 0:
        raise ValueError("The prompt is empty. Give at least one token.")
    if length > longest:
        raise ValueError(
            f"The prompt has {length} tokens, the target's context at most {longest}. Shorten the prompt."
        )


def refuse_full_cache(
    cache: HybridCache, resumption: Resumption, input_ids: torch.Tensor, generation_config: GenerationConfig
) -> None:
    """Raises ValueError if a static cache has no slot for every token but the last of the longest answer."""
    slots = cache.get_max_length()
    new_tokens = generation_config.max_length - input_ids.shape[1]
    needed = cache.committed_length + resumption.num_new + new_tokens - 1
    if 0 <= slots < needed:
        raise ValueError(
            f"The static cache has {slots} slots; the prompt and {new_tokens} new tokens need {needed}. "
            "Pass a larger cache, lower max_new_tokens, or let generate() create the cache."
        )


def prompt_length(input_ids: torch.Tensor, model_kwargs: dict) -> int:
    """Rows of the prompt as given to the call: of the embeddings where these are given, else of the token ids."""
    embeds = model_kwargs.get("inputs_embeds")
    return input_ids.shape[1] if embeds is None else embeds.shape[1]


def _context_length(config: PreTrainedConfig) -> int:
    text_config = config.get_text_config(decoder=True)
    rope = text_config.rope_parameters or {}
    stretched = rope.get("factor", 1.0) * rope.get("original_max_position_embeddings", 0)
    return max(text_config.max_position_embeddings, int(stretched))


def _asked(call: inspect.BoundArguments, defaults: GenerationConfig) -> Callable:
    """Looks a generation option up where generate() would: keyword, the call's config, the model's config."""
    kwargs, config = call.arguments.get("kwargs", {}), call.arguments.get("generation_config")

    def lookup(name: str):
        values = (kwargs.get(name), getattr(config, name, None), getattr(defaults, name, None))
        return next((value for value in values if value is not None), None)

    return lookup
