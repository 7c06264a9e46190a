"""How generate() of an attached model reaches the two loops. The only file that overrides transformers' hooks."""

import functools
import inspect
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from transformers import GenerationMixin
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS, GenerationMode
from transformers.utils import logging

from ..kernels.gated_delta_rule import MAX_ROWS
from ..modeling.drafter import Drafter
from ..modeling.hybrid_cache import HybridCache
from ..modeling.target import input_embedding
from .assisted_call import AssistedCall, CallOptions, draft_after_prefill
from .cache_reuse import Resumption, resume
from .cached_images import drop_cached_images, refuse_unplaced_images
from .call_checks import (
    ROLLBACK_CACHES,
    drafting_obstacle,
    names_no_assistant,
    prompt_length,
    refuse_full_cache,
    refuse_host_draft_options,
    refuse_prompt,
    refuse_stateful_processors,
    refuse_unsupported,
    warn_of_recurrent_assistant,
)
from .device_call import Engines
from .length_policies import LengthPolicy, parse_policy
from .outputs import HybridSpecGenerateOutput
from .plain_call import PlainCall
from .prefill import prefill_head
from .restore_point import restored_on_failure
from .statistics import GenerationStatistics

logger = logging.get_logger(__name__)


@dataclass
class Attachment:
    """What attach() leaves on a model.

    Attributes:
        drafter: drafts in every call that names no other assistant, or None.
        length_policy: of calls that name none; None for the stated default.
        statistics: of the newest call that drafted, or that ran in our loop.
        engines: fixed buffers and captured rounds, made by the first call that uses them.
    """

    drafter: Drafter | None = None
    length_policy: LengthPolicy | None = None
    statistics: GenerationStatistics | None = None
    engines: Engines = field(default_factory=Engines)


class HybridSpecGenerationMixin:
    """Goes before a stock class: lossless assisted decoding on hybrid targets."""

    # Blocks roll the recurrent state back, so transformers' guard against stateful models does not apply.
    _is_stateful = False

    @property
    def generation_statistics(self) -> GenerationStatistics | None:
        """Statistics of the newest call on this model that drafted, or that ran in our loop."""
        return self._hybridspec.statistics

    def generate(self, *args, **kwargs):
        """transformers' generate, every argument with its meaning, and two more.

        Args:
            length_policy: a LengthPolicy or its name (`full`, `static:6`); how many rows a round verifies.
            decoding_path: `auto` (default), `graphs` (rounds captured on a GPU, which `auto` takes where they can
                serve the call), `round` or `host`.
        """
        call = inspect.signature(GenerationMixin.generate).bind_partial(self, *args, **kwargs)
        if self._hybridspec.drafter is not None and names_no_assistant(call, self.generation_config):
            obstacle = drafting_obstacle(call, self.generation_config)
            if obstacle is None:
                call.arguments["assistant_model"] = self._hybridspec.drafter
            else:
                logger.warning_once(f"The attached drafter is left out of this call: {obstacle}.")
        if isinstance(call.arguments.get("assistant_model"), Drafter):
            refuse_host_draft_options(call, self.generation_config)
        call.arguments.pop("self")
        extra = call.arguments.pop("kwargs", {})
        return super().generate(**call.arguments, **extra)

    def _prepare_generation_config(self, generation_config, **kwargs):
        given = {name: kwargs.pop(name, None) for name in ("length_policy", "decoding_path")}
        named = tuple(name for name, value in given.items() if value is not None)
        length_policy = given["length_policy"] or self._hybridspec.length_policy
        if isinstance(length_policy, str):
            length_policy = parse_policy(length_policy)
        options = CallOptions(length_policy, given["decoding_path"] or "auto", named)
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        # Private like the host's own notes on the copy it makes for the call.
        generation_config._hybridspec_options = options
        return generation_config, model_kwargs

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if is_assisted:
            refuse_unsupported(generation_config)
        if not isinstance(assistant, Drafter) or not is_assisted:
            is_plain = generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            generation_config._hybridspec_options.refuse_unused(is_plain)
        if not isinstance(assistant, Drafter):
            if generation_config.speculation_type is not None and assistant is None:
                raise ValueError(
                    f"speculation_type={generation_config.speculation_type!r} would have no effect without a drafter. "
                    "Pass assistant_model=AutoDrafter.from_pretrained(...), or leave it out."
                )
            warn_of_recurrent_assistant(assistant)
            return super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        others = {key: value for key, value in generation_mode_kwargs.items() if key != "assistant_model"}
        super()._validate_generation_mode(generation_mode, generation_config, others)
        if is_assisted:
            drafter = assistant
            drafter.bind(input_embedding(self), self.get_output_embeddings(), self.config)

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        refuse_unplaced_images(model_kwargs)
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if not is_assisted and not generation_config.is_assistant:
            return super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        if generation_config.use_cache is False:
            raise ValueError("Assisted decoding needs a cache: leave use_cache out or set it to True.")
        kind = generation_config.cache_implementation
        if model_kwargs.get("cache") is not None:
            model_kwargs["cache"] = HybridCache.convert(model_kwargs["cache"], self.config)
            # The host refuses a cache beside cache_implementation.
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        elif kind in ROLLBACK_CACHES:
            is_static = kind in ALL_STATIC_CACHE_IMPLEMENTATIONS
            # A block may reach beyond the last token that is kept.
            model_kwargs["cache"] = HybridCache(self.config, max_cache_length + MAX_ROWS if is_static else None)
        else:
            raise ValueError(
                f"cache_implementation {kind!r} cannot be rolled back. Use 'dynamic' or 'static' with an assistant."
            )
        if generation_config.is_assistant:
            model_kwargs["cache"].activate_past_recording()

    def _valid_auto_compile_criteria(self, model_kwargs, generation_config):
        if isinstance(model_kwargs.get("cache"), HybridCache):
            return False
        return super()._valid_auto_compile_criteria(model_kwargs, generation_config)

    # The host reads this signature to learn what a model takes.
    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=None, cache=None, is_first_iteration=False, **kwargs
    ):
        if isinstance(cache, HybridCache) and cache.is_recording:
            if is_first_iteration and cache.prefill_length is not None:
                next_sequence_length, cache.prefill_length = cache.prefill_length, None
            elif not is_first_iteration and cache.committed_length:
                cache.extend_block(next_sequence_length or input_ids.shape[1])
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        cache = model_kwargs.get("cache")
        if generation_config.is_assistant and isinstance(cache, HybridCache) and not cache.committed_length:
            # An assistant is cropped by one token more than it drafted: the prompt's last token must be a block row.
            head = input_ids[:, :-1]
            if head.shape[1]:
                mask = model_kwargs.get("attention_mask")
                self(head, attention_mask=None if mask is None else mask[:, :-1], cache=cache, logits_to_keep=1)
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **model_kwargs,
    ):
        call = PlainCall(
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            streamer,
            model_kwargs,
        )
        with call.reserved() as run:
            if run is not None:
                return call.decode(run)
        return super()._sample(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    def _get_candidate_generator(self, generation_config, *args, **kwargs):
        call = getattr(generation_config, "_hybridspec_call", None)
        if call is not None:
            return call.candidate_generator
        return draft_after_prefill(super()._get_candidate_generator(generation_config, *args, **kwargs))

    def _assisted_decoding(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        inputs_tensor=None,
        assistant_model=None,
        assistant_tokenizer=None,
        tokenizer=None,
        **model_kwargs,
    ):
        refuse_prompt(input_ids, model_kwargs, self.config)
        cache = model_kwargs["cache"]
        resumption = _resume(cache, input_ids, generation_config, model_kwargs)
        refuse_full_cache(cache, resumption, input_ids, generation_config)
        drop_cached_images(model_kwargs, cache, input_ids, resumption, self.config)
        with restored_on_failure(cache):
            call, taps = None, nullcontext()
            if isinstance(assistant_model, Drafter):
                call = AssistedCall(
                    self,
                    assistant_model,
                    cache,
                    generation_config._hybridspec_options,
                    logits_processor,
                    stopping_criteria,
                    generation_config,
                    streamer,
                    model_kwargs.get("attention_mask"),
                    model_kwargs.get("position_ids"),
                )
                self._hybridspec.statistics = call.statistics
                generation_config._hybridspec_call = call
                taps = call.taps(call.candidate_generator.on_features)
            if call is not None and call.statistics.path == "round":
                output = call.run_rounds(input_ids, model_kwargs)
            else:
                refuse_stateful_processors(logits_processor)
                with taps:
                    prefill_head(self, cache, input_ids, resumption, generation_config, model_kwargs)
                    output = super()._assisted_decoding(
                        input_ids,
                        logits_processor,
                        stopping_criteria,
                        generation_config,
                        synced_gpus=synced_gpus,
                        streamer=streamer,
                        inputs_tensor=inputs_tensor,
                        assistant_model=assistant_model,
                        assistant_tokenizer=assistant_tokenizer,
                        tokenizer=tokenizer,
                        **model_kwargs,
                    )
        cache.stop_recording()
        is_tensor = isinstance(output, torch.Tensor)
        cache.token_ids = resumption.committed_ids(output if is_tensor else output.sequences, cache)
        if call is not None and not is_tensor and not isinstance(output, HybridSpecGenerateOutput):
            output = HybridSpecGenerateOutput(**output, statistics=call.statistics)
        return output


def _resume(cache: HybridCache, input_ids, generation_config, model_kwargs) -> Resumption:
    mask = model_kwargs.get("attention_mask")
    mask_length = generation_config._mask_length if mask is None else mask.shape[1]
    return resume(cache, input_ids, prompt_length(input_ids, model_kwargs), mask_length)
