"""Inputs of the GDN benchmarks: the layers of Qwen3.6-35B-A3B, rows as projections leave them, and the recurrence."""

from dataclasses import asdict, dataclass, replace

import torch
from torch.nn.functional import softplus

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.gated_delta_rule import CompactFactors, commit_gated_delta_rule, verify_gated_delta_rule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class LayerRows:
    """Rows of one block in all layers, with their gates, and what a kernel takes that computes the gates itself.

    Attributes:
        query, key: `[L, 1, n, H, K]`, after convolution and SiLU, not normalised.
        value: `[L, 1, n, HV, V]`.
        log_decay: `[L, 1, n, HV]` fp32.
        beta: `[L, 1, n, HV]`, rounded as the host rounds it.
        a, b: `[L, 1, n, HV]`, of which log_decay is -exp(A_log) softplus(a + dt_bias) and beta sigmoid(b).
        A_log, dt_bias: `[L, HV]` fp32.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.query.shape[2]

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """Query, key, value, log-decay and beta of one layer, in the order of `verify_gated_delta_rule`."""
        return tuple(x[index] for x in (self.query, self.key, self.value, self.log_decay, self.beta))

    def with_unrounded_beta(self) -> "LayerRows":
        """As a kernel sees them that computes beta itself, in fp32."""
        return replace(self, beta=self.b.float().sigmoid())


@dataclass(frozen=True)
class Shape:
    """GDN layers of the target."""

    layers: int = 30
    num_k_heads: int = 16
    num_v_heads: int = 32
    k_dim: int = 128
    v_dim: int = 128

    @property
    def state_bytes(self) -> int:
        return 4 * self.layers * self.num_v_heads * self.k_dim * self.v_dim

    def states(self) -> torch.Tensor:
        """`[L, 1, HV, K, V]` fp32 of unit scale."""
        return torch.randn(self.layers, 1, self.num_v_heads, self.k_dim, self.v_dim, device=DEVICE)

    def factors(self, rows: int) -> CompactFactors:
        heads = {name: size for name, size in asdict(self).items() if name != "layers"}
        return CompactFactors.empty(self.layers, 1, rows, **heads, device=DEVICE)

    def rows(self, rows: int, dtype: torch.dtype) -> LayerRows:
        """Random rows, with decays from 1 to about e^-3."""
        block, options = (self.layers, 1, rows), {"device": DEVICE}
        query, key = torch.randn(2, *block, self.num_k_heads, self.k_dim, **options).to(dtype)
        value = torch.randn(*block, self.num_v_heads, self.v_dim, **options).to(dtype)
        a, b = torch.randn(2, *block, self.num_v_heads, **options).to(dtype)
        A_log, dt_bias = torch.randn(2, self.layers, self.num_v_heads, **options) * 0.5 - 1
        rate, bias = A_log.exp()[:, None, None], dt_bias[:, None, None]
        log_decay = -rate * softplus(a.float() + bias)
        return LayerRows(query, key, value, log_decay, b.sigmoid(), a, b, A_log, dt_bias)


def verify_layers(rows: LayerRows, states: torch.Tensor, factors: CompactFactors) -> list[torch.Tensor]:
    """One round's verifications: outputs `[1, n, HV, V]` of each layer.

    The first layer follows whatever ran before, which may have written its state; the others follow a verification.
    """
    return [
        verify_gated_delta_rule(*rows.layer(i), state, factors[i], state_is_settled=i > 0)
        for i, state in enumerate(states)
    ]


def recurrence(shape: Shape, rows: LayerRows, states: torch.Tensor) -> torch.Tensor:
    """Outputs `[L, 1, n, HV, V]` of the fp32 recurrence, one row after another; `states` is advanced by all rows."""
    outputs, single = [], shape.factors(1)
    with use_kernels("reference"):
        for i in range(rows.num_rows):
            fields = ("query", "key", "value", "log_decay", "beta")
            row = replace(rows, **{name: getattr(rows, name)[:, :, i : i + 1].float() for name in fields})
            outputs.append(torch.stack(verify_layers(row, states, single)))
            commit_gated_delta_rule(states, single, 1)
    return torch.cat(outputs, dim=2)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected value."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
