"""ReaDy: DSpark whose draft layers also read the target's committed recurrent states (arXiv 2610.20503)."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers import initialization as init

from ...kernels.state_reader import project_states, read_projected_states
from ..drafter_layers import BlockInput, DrafterLayer
from ..dspark.configuration_dspark import DSparkConfig
from ..dspark.modeling_dspark import DSparkDrafter
from .configuration_ready import ReadyConfig


class StateReader(nn.Module):
    """Adds to each draft row what it reads from J recurrent states: h + up(silu(down(f))).

    Parameters are per state. `up` starts at zero, so that a fresh reader changes nothing.
    """

    def __init__(self, config: ReadyConfig):
        super().__init__()
        states, rank, hidden = config.num_states, config.reader_rank, config.hidden_size
        self.query_projection = nn.Parameter(torch.empty(states, rank, hidden))
        self.key_projection = nn.Parameter(torch.empty(states, rank, config.reader_key_dim))
        self.value_projection = nn.Parameter(torch.empty(states, config.reader_value_dim, rank))
        self.down_proj = nn.Linear(states * (rank + 1), config.reader_width, bias=False)
        self.up_proj = nn.Linear(config.reader_width, hidden, bias=False)

    def forward(self, hidden: Tensor, states: Tensor, rows_per_block: int) -> Tensor:
        """hidden [1, N * B, H], states [N, J, K, V] -> [1, N * B, H]."""
        blocks = hidden.view(-1, rows_per_block, hidden.shape[-1])
        projected = project_states(states, self.value_projection, self.key_projection)
        features = read_projected_states(projected, blocks, self.query_projection)
        update = self.up_proj(F.silu(self.down_proj(features.to(hidden.dtype))))
        return hidden + update.view_as(hidden)


class ReadyLayer(DrafterLayer):
    def __init__(self, config: ReadyConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.state_reader = StateReader(config) if layer_idx in config.reader_injection_layers else None
        self.reads_after_attention = config.reader_injection == "post_attention"

    def forward(self, hidden: Tensor, block: BlockInput) -> Tensor:
        reads = self.state_reader is not None
        if reads and not self.reads_after_attention:
            hidden = self.state_reader(hidden, block.states, block.rows_per_block)
        hidden = hidden + self.attend(self.input_layernorm(hidden), block)
        if reads and self.reads_after_attention:
            hidden = self.state_reader(hidden, block.states, block.rows_per_block)
        return hidden + self.feed_forward(self.post_attention_layernorm(hidden), block)


class ReadyDrafter(DSparkDrafter):
    """ReaDy. `propose` and `forward` need `recurrent_states` of the layers in `recurrent_layer_ids`: the state after
    the last committed token, never one of a speculative row."""

    config_class = ReadyConfig
    layer_class = ReadyLayer

    def __init__(self, config: ReadyConfig):
        super().__init__(config)
        self.recurrent_layer_ids = tuple(config.reader_state_layers)

    @classmethod
    def from_dspark(cls, drafter: DSparkDrafter, **reader: int | str | list[int]) -> "ReadyDrafter":
        """A DSpark drafter with fresh readers, equal to it until they are trained; its weights are copied.

        reader: the `reader_` fields of `ReadyConfig`; reader_state_layers and reader_num_heads are required.
        """
        values = {field.name: deepcopy(getattr(drafter.config, field.name)) for field in fields(DSparkConfig)}
        ready = cls(ReadyConfig(**values, **reader)).to(drafter.compute_device, drafter.compute_dtype)
        ready.load_state_dict(drafter.state_dict(), strict=False)
        return ready.train(drafter.training)

    def gather_states(self, recurrent_states: Mapping[int, Tensor] | None) -> Tensor:
        """[N, J, K, V] of the listed layers, in order. Raises ValueError for missing or mis-shaped states."""
        missing = [layer for layer in self.recurrent_layer_ids if layer not in (recurrent_states or {})]
        if missing:
            raise ValueError(f"A ReaDy drafter needs the committed recurrent states of target layers {missing}.")
        states = [recurrent_states[layer] for layer in self.recurrent_layer_ids]
        config = self.config
        expected = (config.reader_num_heads, config.reader_key_dim, config.reader_value_dim)
        for layer, state in zip(self.recurrent_layer_ids, states, strict=True):
            if tuple(state.shape[1:]) != expected:
                raise ValueError(
                    f"The recurrent state of layer {layer} is {tuple(state.shape)}; this drafter reads [N, "
                    f"{', '.join(map(str, expected))}]."
                )
        return torch.cat(states, dim=1).to(self.compute_device)

    def _misfits(self, target: PreTrainedConfig) -> list[str]:
        misfits = super()._misfits(target)
        sizes = {
            "linear_num_value_heads": self.config.reader_num_heads,
            "linear_key_head_dim": self.config.reader_key_dim,
            "linear_value_head_dim": self.config.reader_value_dim,
        }
        for name, expected in sizes.items():
            if getattr(target, name, None) != expected:
                misfits.append(f"{name} is {getattr(target, name, None)}, the state reader expects {expected}")
        kinds = getattr(target, "layer_types", None) or []
        wrong = [layer for layer in self.recurrent_layer_ids if kinds[layer : layer + 1] != ["linear_attention"]]
        if wrong:
            misfits.append(f"layers {wrong} hold no recurrent state, but the state reader reads them")
        return misfits

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, StateReader):
            for name in ("query_projection", "key_projection", "value_projection"):
                parameter = getattr(module, name)
                # W_q reduces over the hidden size; U^T over the rank and V^T over the value size, both their axis 1.
                fan_in = parameter.shape[2] if name == "query_projection" else parameter.shape[1]
                init.normal_(parameter, std=fan_in**-0.5)
            init.zeros_(module.up_proj.weight)
