"""A generate() call without a drafter, in captured rounds of one row: plain decoding with the same kernels."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .device_call import DeviceCall, DeviceRun
from .emission import Emission
from .round_engine import are_default
from .statistics import GenerationStatistics
from .verification import TokenVerifier

logger = logging.get_logger(__name__)


@dataclass
class PlainCall:
    """The arguments of the host's `_sample`."""

    model: PreTrainedModel
    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    synced_gpus: bool
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]

    @contextmanager
    def reserved(self) -> Iterator[DeviceRun | None]:
        """Gives an engine for the call, or None if the host's loop takes it."""
        with ExitStack() as stack:
            yield self._reserve(stack)

    def decode(self, run: DeviceRun):
        """Prefills and decodes; returns what generate() returns."""
        config = self.generation_config
        self.model._hybridspec.statistics = statistics = GenerationStatistics("graphs", "plain")
        emission = self._emission()
        verifier = TokenVerifier(self.logits_processor, config.do_sample)
        call = self._device_call()
        outputs = self.model._prefill(self.input_ids, config, dict(self.model_kwargs))
        first = verifier.verify(self.input_ids, self.input_ids.new_empty(0), outputs.logits[0, -1:])
        del outputs
        emission.append(first, emission.admit(first))
        run.decode(call, emission, statistics, verifier.uniforms)
        emission.end()
        if not config.return_dict_in_generate:
            return emission.input_ids
        return GenerateDecoderOnlyOutput(sequences=emission.input_ids, cache=call.cache)

    def _reserve(self, stack: ExitStack) -> DeviceRun | None:
        wanted = self.generation_config._hybridspec_options.decoding_path
        if wanted == "host" or (wanted == "auto" and not are_default(self.model.device)):
            return None
        run = self._host_reason()
        if run is None:
            run = self._device_call().reserve(stack, self._emission())
        if isinstance(run, DeviceRun):
            return run
        if wanted == "graphs":
            raise ValueError(f"decoding_path='graphs' cannot serve this call: {run}. Use 'auto' or 'host'.")
        logger.warning_once(f"Plain decoding is left to transformers' own loop: {run}.")
        return None

    def _host_reason(self) -> str | None:
        """What only the host's loop knows how to do."""
        config = self.generation_config
        if self.synced_gpus or config.is_assistant:
            return "other models wait for each step"
        if self.model_kwargs.get("cache") is None:
            return "there is no cache"
        embeds = self.model_kwargs.get("inputs_embeds")
        if (self.input_ids if embeds is None else embeds).shape[0] != 1:
            return "there are several sequences"
        if config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions):
            return "hidden states or attentions are to be returned"
        return None

    def _emission(self) -> Emission:
        return Emission(self.input_ids, self.stopping_criteria, self.generation_config, self.streamer)

    def _device_call(self) -> DeviceCall:
        kwargs = self.model_kwargs
        return DeviceCall(
            self.model,
            None,
            None,
            kwargs["cache"],
            self.logits_processor,
            self.generation_config,
            kwargs.get("attention_mask"),
            kwargs.get("position_ids"),
        )
