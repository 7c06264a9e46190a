"""What of a call's logits processors can be done in device memory: nothing, or temperature, top-k, top-p and min-p."""

from dataclasses import dataclass

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# In the order in which the host applies them; attribute of the warper, field of the plan.
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@dataclass(frozen=True)
class SamplingPlan:
    """How tokens are chosen from logits; fields that are left out change nothing.

    Attributes:
        top_k: tokens kept; a number beyond any vocabulary keeps all.
    """

    do_sample: bool
    temperature: float = 1.0
    top_k: int = 1 << 31
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, logits_processor: LogitsProcessorList, do_sample: bool) -> "SamplingPlan | str":
        """The plan of a call, or why it has none, as the rest of a sentence."""
        fields, order = {}, list(_WARPERS)
        for processor in logits_processor:
            if type(processor) not in order or not do_sample:
                return f"{type(processor).__name__} works on the host's scores"
            if (
                getattr(processor, "min_tokens_to_keep", 1) != 1
                or getattr(processor, "filter_value", -torch.inf) > -1e30
            ):
                return f"{type(processor).__name__} has a filter_value or min_tokens_to_keep of its own"
            # Each at most once, in the host's order.
            order = order[order.index(type(processor)) + 1 :]
            fields[_WARPERS[type(processor)]] = getattr(processor, _WARPERS[type(processor)])
        return cls(do_sample, **fields)

    @property
    def is_filtered(self) -> bool:
        """Whether tokens may be left out."""
        return (self.top_k, self.top_p, self.min_p) != (1 << 31, 1.0, 0.0)
