"""The output of an assisted generate() call."""

from dataclasses import dataclass

from transformers.generation.utils import GenerateDecoderOnlyOutput

from .statistics import GenerationStatistics


@dataclass
class HybridSpecGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output with the call's `statistics` (path taken, rounds, lengths)."""

    statistics: GenerationStatistics | None = None
