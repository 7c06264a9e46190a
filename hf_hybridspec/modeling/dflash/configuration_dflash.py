"""Configurations of DFlash and DFlash2 drafters (z-lab layouts of both generations)."""

from typing import Any

from ..drafter_config import DrafterConfig


class DFlashConfig(DrafterConfig):
    """DFlash: row k of the block predicts the token at its own position: B rows hold B - 1 draft tokens."""

    model_type = "hybridspec_dflash"
    published_architecture = "DFlashDraftModel"
    family = "dflash"


class DFlash2Config(DrafterConfig):
    """DFlash2: DFlash with a dynamic causal convolution around each sublayer and a candidate selector.

    conv_kernel_size: taps of a convolution, in rows of the block. conv_group_size: channels that share a dynamic tap.
    selector_rank: width of the selector's codebooks. selector_top_k: candidates per row that it reranks.
    """

    model_type = "hybridspec_dflash2"
    published_architecture = "DFlash2DraftModel"
    family = "dflash2"

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def _check_family(self) -> list[str]:
        problems = []
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if getattr(self, name) < 1:
                problems.append(f"{name} must be positive, got {getattr(self, name)}")
        if self.conv_group_size > 0 and self.hidden_size % self.conv_group_size:
            problems.append(
                f"hidden_size {self.hidden_size} must be a multiple of conv_group_size {self.conv_group_size}"
            )
        if self.draft_vocab_size is not None:
            problems.append("a reduced draft vocabulary is not supported with a candidate selector")
        return problems

    def _published_block(self) -> dict[str, Any]:
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        return super()._published_block() | {name: getattr(self, name) for name in names}
