"""Faster forms of three target operations for training at large batch; same functions, other order of the sums.

The stock fallbacks of transformers are written for inference. `fast_forms` replaces, on the loaded classes, the
chunked gated delta rule, the depthwise convolution and the experts; the weights and their names stay those of
`Qwen3_5MoeForCausalLM`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock

_CHUNK = 64
_SMALL_BLOCK = 16


def _matmul_exact(a: Tensor, b: Tensor) -> Tensor:
    """fp32 product without TF32 rounding, whatever the process's setting."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    product = a @ b
    torch.backends.cuda.matmul.allow_tf32 = allowed
    return product


def _invert_unit_lower(lower: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower triangular L [..., 64, 64], fp32.

    Diagonal blocks of 16 by products of powers (I - L)(I + L^2)(I + L^4)(I + L^8), whose entries stay small enough for
    fp32 at that size; then blocks are joined two by two, which is forward substitution by blocks.
    """
    size = lower.shape[-1]
    count = size // _SMALL_BLOCK
    blocks = lower.unflatten(-1, (count, _SMALL_BLOCK)).unflatten(-3, (count, _SMALL_BLOCK))
    small = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()
    identity = torch.eye(_SMALL_BLOCK, device=lower.device, dtype=lower.dtype)
    inverse, power = identity - small, small
    for _ in range(3):
        power = _matmul_exact(power, power)
        inverse = inverse + _matmul_exact(inverse, power)
    width = _SMALL_BLOCK
    while width < size:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        pairs = size // (2 * width)
        joined = torch.zeros(*lower.shape[:-2], pairs, 2 * width, 2 * width, device=lower.device, dtype=lower.dtype)
        for i in range(pairs):
            row = (2 * i + 1) * width
            cross = lower[..., row : row + width, row - width : row]
            joined[..., i, width:, :width] = -_matmul_exact(
                _matmul_exact(second[..., i, :, :], cross), first[..., i, :, :]
            )
        joined[..., :width, :width] = first
        joined[..., width:, width:] = second
        inverse, width = joined, 2 * width
    return inverse[..., 0, :, :]


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 with the gradient -X^T G X^T, so that nothing of the inversion itself is kept."""

    @staticmethod
    def forward(ctx, lower: Tensor) -> Tensor:
        inverse = _invert_unit_lower(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -_matmul_exact(_matmul_exact(transposed, gradient), transposed).tril(-1)


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over a sequence; arguments and results as transformers' `torch_chunk_gated_delta_rule`.

    query, key [B, T, H, K], value [B, T, HV, V], g, beta [B, T, HV]; returns [B, T, HV, V] and the state [B, HV, K,
    V].
    """
    dtype, length, group = query.dtype, query.shape[1], value.shape[2] // key.shape[2]
    query, key, value = (x.float() for x in (query, key, value))
    if use_qk_l2norm_in_kernel:
        query, key = _normalise(query), _normalise(key)
    query, key = (x.repeat_interleave(group, dim=2) for x in (query * query.shape[-1] ** -0.5, key))
    padding = -length % _CHUNK

    def chunks(x: Tensor) -> Tensor:
        x = F.pad(x.float().transpose(1, 2), (0, 0, 0, padding))
        return x.unflatten(2, (-1, _CHUNK))

    query, key, value = chunks(query), chunks(key), chunks(value)
    beta, decay = chunks(beta.unsqueeze(-1)), chunks(g.unsqueeze(-1)).squeeze(-1).cumsum(-1)
    causal = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=query.device).tril()
    pair_decay = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    key_beta, start_decay = key * beta, decay.exp().unsqueeze(-1)
    inverse = _UnitLowerInverse.apply((key_beta @ key.transpose(-1, -2) * pair_decay).tril(-1))
    written, reading = inverse @ (value * beta), inverse @ (key_beta * start_decay)
    attention = query @ key.transpose(-1, -2) * pair_decay
    keys_to_end = (key * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    chunk_decay = decay[..., -1].exp()[..., None, None]

    state = torch.zeros_like(value[:, :, 0, :1].expand(-1, -1, key.shape[-1], -1)) if initial_state is None else None
    state = initial_state.float() if state is None else state
    states, updates = [], []
    pieces = (x.unbind(2) for x in (written, reading, keys_to_end, chunk_decay))
    for written_i, reading_i, keys_i, decay_i in zip(*pieces, strict=True):
        update = written_i - reading_i @ state
        states.append(state)
        updates.append(update)
        state = state * decay_i + keys_i @ update
    output = (query * start_decay) @ torch.stack(states, 2) + attention @ torch.stack(updates, 2)
    output = output.flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype)
    return output.contiguous(), state if output_final_state else None


def causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs
) -> Tensor:
    """Depthwise causal convolution [B, C, T] as a sum of shifted products, which has a cheap gradient."""
    kernel, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (kernel - 1, 0))
    out = sum(padded[..., i : i + length] * weight[:, i, None] for i in range(kernel))
    out = out if bias is None else out + bias[:, None]
    return F.silu(out) if activation == "silu" else out


def dense_experts(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every expert on every row as two matrix products, times the routing weight (0 for experts not chosen)."""
    weights = torch.zeros(len(hidden_states), self.num_experts, dtype=hidden_states.dtype, device=hidden_states.device)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(weights.dtype))
    gate_up = F.linear(hidden_states, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (self.num_experts, -1))
    gate, up = gate_up.chunk(2, dim=-1)
    hidden = (F.silu(gate) * up * weights.unsqueeze(-1)).flatten(1)
    return hidden @ self.down_proj.transpose(1, 2).flatten(0, 1)


@contextmanager
def fast_forms(compiled: bool = False) -> Iterator[None]:
    """While entered, `Qwen3_5MoeForCausalLM` computes with the three forms above; the stock ones come back afterwards.

    With `compiled`, they and the norms go through torch.compile, each by itself (the whole model takes minutes).
    """
    transform = functools.partial(torch.compile, dynamic=False) if compiled else lambda function: function
    replaced: list[tuple[object, str, object]] = [
        (stock, "torch_chunk_gated_delta_rule", chunk_gated_delta_rule),
        (stock, "causal_conv1d_fn", causal_conv1d),
        (stock.Qwen3_5MoeExperts, "forward", dense_experts),
    ]
    if compiled:
        norms = (stock.Qwen3_5MoeRMSNorm, stock.Qwen3_5MoeRMSNormGated)
        replaced.extend((norm, "forward", norm.forward) for norm in norms)
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, transform(function))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)
