"""Configuration of ReaDy drafters: DSpark plus a reader of the target's committed recurrent states."""

from typing import Any

from ..dspark.configuration_dspark import DSparkConfig
from ..published_keys import READER_KEYS

INJECTIONS = ("post_attention", "pre_attention")


class ReadyConfig(DSparkConfig):
    """ReaDy; no checkpoint of it is published, so the layout is ours: DSpark's, plus a `ready_config` section whose
    keys are the fields below without `reader_`.

    reader_rank: r, the width of one state's read.
    reader_state_layers: target GDN layers whose committed states are read.
    reader_injection_layers: draft layers that add what was read to their hidden rows; default the last.
    reader_injection: "post_attention" (after the attention residual, before the MLP) or "pre_attention".
    reader_width: bottleneck of the reader's MLP; default 4 r rounded up to a multiple of 16.
    reader_num_heads, reader_key_dim, reader_value_dim: value heads and head sizes of the target's recurrent state.
    """

    model_type = "hybridspec_ready"
    published_architecture = "ReadyDraftModel"
    family = "ready"

    reader_rank: int = 8
    reader_state_layers: list[int] | None = None
    reader_injection_layers: list[int] | None = None
    reader_injection: str = "post_attention"
    reader_width: int | None = None
    reader_num_heads: int = 0
    reader_key_dim: int = 128
    reader_value_dim: int = 128

    def __post_init__(self, **kwargs):
        if self.reader_injection_layers is None and self.num_hidden_layers:
            self.reader_injection_layers = [self.num_hidden_layers - 1]
        if self.reader_width is None:
            self.reader_width = -(-4 * self.reader_rank // 16) * 16
        super().__post_init__(**kwargs)

    def _check_family(self) -> list[str]:
        problems = super()._check_family()
        for name in ("reader_rank", "reader_width", "reader_num_heads", "reader_key_dim", "reader_value_dim"):
            if getattr(self, name) < 1:
                problems.append(f"{name} must be positive, got {getattr(self, name)}")
        if not self.reader_state_layers or min(self.reader_state_layers) < 0:
            problems.append(f"reader_state_layers must list target GDN layers, got {self.reader_state_layers}")
        outside = [layer for layer in self.reader_injection_layers if not 0 <= layer < self.num_hidden_layers]
        if outside or not self.reader_injection_layers:
            problems.append(
                f"reader_injection_layers must lie in [0, {self.num_hidden_layers - 1}], "
                f"got {self.reader_injection_layers}"
            )
        if self.reader_injection not in INJECTIONS:
            problems.append(f"reader_injection must be one of {INJECTIONS}, got {self.reader_injection!r}")
        return problems

    @property
    def num_states(self) -> int:
        """J, the state matrices that are read: selected layers times value heads."""
        return len(self.reader_state_layers) * self.reader_num_heads

    def published_form(self) -> dict[str, Any]:
        section = {name.removeprefix("reader_"): getattr(self, name) for name in sorted(READER_KEYS)}
        return super().published_form() | {"ready_config": section}
