"""Random blocks of the gated delta rule, and the recurrence that every implementation is held against."""

from dataclasses import dataclass, replace

import torch

from hf_hybridspec.kernels.gated_delta_rule import CompactFactors


@dataclass(frozen=True)
class Block:
    """Arguments of `verify_gated_delta_rule`, in its order, without the factors."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    recurrent_state: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (self.query, self.key, self.value, self.log_decay, self.beta, self.recurrent_state)

    def rows(self, start: int, stop: int, recurrent_state: torch.Tensor | None = None) -> "Block":
        """Rows start..stop-1, after `recurrent_state` if given."""
        state = self.recurrent_state if recurrent_state is None else recurrent_state
        return Block(*(x[:, start:stop] for x in self.inputs[:5]), state)

    def factors(self, rows: int = 16) -> CompactFactors:
        """NaN-filled factors of this block's shape: what is read without having been written shows."""
        factors = CompactFactors.empty(
            self.query.shape[0],
            rows,
            num_k_heads=self.key.shape[2],
            num_v_heads=self.value.shape[2],
            k_dim=self.key.shape[3],
            v_dim=self.value.shape[3],
            device=self.key.device,
        )
        for tensor in (factors.z, factors.k, factors.g):
            tensor.fill_(torch.nan)
        return factors


def random_block(
    rows: int,
    num_k_heads: int = 2,
    num_v_heads: int = 4,
    k_dim: int = 32,
    v_dim: int = 32,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Block:
    """Activations as after convolution and SiLU in `dtype`, decays from e^-3 to 1, a state of unit scale."""
    generator = torch.Generator().manual_seed(1000 * seed + rows)
    heads = {"query": num_k_heads, "key": num_k_heads, "value": num_v_heads}
    widths = {"query": k_dim, "key": k_dim, "value": v_dim}
    fields = {
        name: torch.nn.functional.silu(torch.randn(batch, rows, heads[name], widths[name], generator=generator)).to(
            dtype
        )
        for name in heads
    }
    log_decay = -3.0 * torch.rand(batch, rows, num_v_heads, generator=generator) ** 4
    beta = torch.randn(batch, rows, num_v_heads, generator=generator).to(dtype).sigmoid()
    state = torch.randn(batch, num_v_heads, k_dim, v_dim, generator=generator)
    return on_device(Block(**fields, log_decay=log_decay, beta=beta, recurrent_state=state), device)


def with_nearly_equal_keys(block: Block) -> Block:
    """The block as repeated tokens make it: keys almost alike, hardly any decay, every row written in full."""
    key = block.key[:, :1] + 0.01 * block.key
    return replace(block, key=key, log_decay=1e-3 * block.log_decay, beta=torch.full_like(block.beta, 0.99))


def on_device(block: Block, device: str) -> Block:
    return replace(block, **{name: tensor.to(device) for name, tensor in vars(block).items()})


def recurrence(block: Block, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One row after another: outputs `[B, n, HV, V]`, and the states after 0, 1, ..., n rows."""
    group = block.value.shape[2] // block.key.shape[2]
    query, key = (x.to(dtype).repeat_interleave(group, dim=2) for x in (block.query, block.key))
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * key.shape[-1] ** -0.5
    value, log_decay, beta = block.value.to(dtype), block.log_decay.to(dtype), block.beta.to(dtype)
    states, outputs = [block.recurrent_state.to(dtype)], []
    for i in range(query.shape[1]):
        state = states[-1] * log_decay[:, i].exp()[..., None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, key[:, i])
        z = beta[:, i, :, None] * (value[:, i] - read)
        states.append(state + key[:, i, :, :, None] * z[:, :, None, :])
        outputs.append(torch.einsum("bhkv,bhk->bhv", states[-1], query[:, i]))
    return torch.stack(outputs, dim=1), states


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected value; NaN where `actual` holds one."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm()).item()
