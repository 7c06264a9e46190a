"""A target's weights as the kernels for few rows read them: what reads the same input lies in one matrix.

The parameters of the live model become views of these matrices, so that nothing is held twice: names, values,
`state_dict`, saving and the host's own forward stay as they are. Layers are re-laid one at a time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.block_attention import HeadNorms
from ..kernels.gated_delta_inputs import ProducerWeights
from ..kernels.moe_experts import ExpertWeights
from .sparse_moe import has_router
from .target import text_config, text_model


@dataclass(frozen=True)
class GatedDeltaWeights:
    """A GDN layer: norm scale fp32 `[H]`, input projections, head sizes, output norm `[V]`, output `[H, HV * V]`."""

    norm_scale: Tensor
    producer: ProducerWeights
    num_k_heads: int
    k_dim: int
    v_dim: int
    norm_weight: Tensor
    output: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """An attention layer: norm scale fp32 `[H]`, q|k|v `[2 (Hq + Hkv) D, H]`, head norms, output `[H, Hq * D]`."""

    norm_scale: Tensor
    projection: Tensor
    norms: HeadNorms
    output: Tensor


@dataclass(frozen=True)
class SparseWeights:
    """An MoE block: norm scale fp32 `[H]`, router and shared expert's gate `[E + 1, H]`, experts."""

    norm_scale: Tensor
    router: Tensor
    experts: ExpertWeights
    top_k: int


@dataclass(frozen=True)
class DenseWeights:
    """A dense MLP: norm scale fp32 `[H]`, gate|up `[2 I, H]`, down `[H, I]`."""

    norm_scale: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    mixer: GatedDeltaWeights | AttentionWeights
    feed_forward: SparseWeights | DenseWeights


@dataclass(frozen=True)
class FusedWeights:
    """A whole target.

    Attributes:
        embedding: `[vocabulary, H]`.
        final_scale: fp32 `[H]`, of the last norm.
        head: `[vocabulary, H]`.
        frequencies: fp32 `[R / 2]` of the rotary embedding; `rope_scaling` multiplies its cos and sin.
        eps: of every norm.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_scale: Tensor
    head: Tensor
    frequencies: Tensor
    rope_scaling: float
    eps: float
    _read: tuple[tuple[nn.Parameter, int, int], ...]

    @property
    def is_current(self) -> bool:
        """Whether the model still holds these very weights: none was moved, replaced or changed since."""
        return all(
            parameter.data_ptr() == pointer and parameter._version == version
            for parameter, pointer, version in self._read
        )


@torch.no_grad()
def fuse_weights(model: PreTrainedModel) -> FusedWeights:
    """Re-lays the weights of a target for which `fused_target_obstacle` finds none; calling again costs nothing.

    Qwen3-Next interleaves the rows of its GDN projections by key head. They stay in that order, and the kernel is told
    where each row lies.
    """
    decoder, config = text_model(model), text_config(model)
    layers = tuple(_fuse_layer(layer, config) for layer in decoder.layers[: config.num_hidden_layers])
    head = model.get_output_embeddings().weight
    read = [*decoder.parameters(), head]
    return FusedWeights(
        embedding=decoder.embed_tokens.weight,
        layers=layers,
        final_scale=_zero_centred(decoder.norm),
        head=head,
        frequencies=decoder.rotary_emb.inv_freq.float(),
        rope_scaling=decoder.rotary_emb.attention_scaling,
        eps=config.rms_norm_eps,
        _read=tuple((parameter, parameter.data_ptr(), parameter._version) for parameter in read),
    )


def joined(*weights: nn.Parameter) -> Tensor:
    """`[sum of N, K]`, of which the weights `[N, K]` become parts; those that are parts of one already stay."""
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + weight.shape[0])
    first, size = weights[0].data, weights[0].shape[1]
    if all(_is_part(weight.data, first, start) for weight, start in zip(weights, starts[:-1], strict=True)):
        return first.as_strided((starts[-1], size), (size, 1))
    whole = torch.cat([weight.data for weight in weights])
    for weight, start in zip(weights, starts[:-1], strict=True):
        weight.data = whole[start : start + weight.shape[0]]
    if whole.is_cuda:
        # What was given up is smaller than the next whole: without this, the allocator would keep it beside that.
        torch.cuda.empty_cache()
    return whole


def _is_part(weight: Tensor, first: Tensor, start: int) -> bool:
    """Whether a weight lies `start` rows after the first one, in the same memory."""
    return (
        weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and weight.storage_offset() == first.storage_offset() + start * first.shape[1]
        and weight.is_contiguous()
    )


def _zero_centred(norm: nn.Module) -> Tensor:
    return 1.0 + norm.weight.float()


def _fuse_layer(layer: nn.Module, config) -> LayerWeights:
    scale = _zero_centred(layer.input_layernorm)
    is_gated_delta = layer.block_type == "linear_attention"
    mixer = _gated_delta(layer.linear_attn, scale) if is_gated_delta else _attention(layer.self_attn, scale)
    return LayerWeights(mixer, _feed_forward(layer.mlp, _zero_centred(layer.post_attention_layernorm), config))


def _gated_delta(mixer: nn.Module, scale: Tensor) -> GatedDeltaWeights:
    if hasattr(mixer, "in_proj_qkvz"):
        projection, order = joined(mixer.in_proj_qkvz.weight, mixer.in_proj_ba.weight), _interleaved_order(mixer)
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        projection, order = joined(*(getattr(mixer, name).weight for name in names)), None
    producer = ProducerWeights(
        projection=projection,
        conv_weight=mixer.conv1d.weight.squeeze(1),
        A_log=mixer.A_log,
        dt_bias=mixer.dt_bias,
        row_order=order,
    )
    return GatedDeltaWeights(
        norm_scale=scale,
        producer=producer,
        num_k_heads=mixer.num_k_heads,
        k_dim=mixer.head_k_dim,
        v_dim=mixer.head_v_dim,
        norm_weight=mixer.norm.weight,
        output=mixer.out_proj.weight,
    )


def _interleaved_order(mixer: nn.Module) -> Tensor:
    """Where the rows q, k, v, z, b, a lie among those that are interleaved by key head: qkvz, then ba."""
    device, heads = mixer.in_proj_qkvz.weight.device, mixer.num_k_heads
    group = mixer.num_v_heads // heads
    sizes = (mixer.head_k_dim, mixer.head_k_dim, group * mixer.head_v_dim, group * mixer.head_v_dim)
    first = torch.arange(heads * sum(sizes), dtype=torch.int32, device=device).view(heads, -1).split(sizes, dim=1)
    second = torch.arange(2 * heads * group, dtype=torch.int32, device=device).view(heads, -1).split(group, dim=1)
    return torch.cat([rows.flatten() for rows in (*first, *(heads * sum(sizes) + part for part in second))])


def _attention(attention: nn.Module, scale: Tensor) -> AttentionWeights:
    return AttentionWeights(
        norm_scale=scale,
        projection=joined(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        norms=HeadNorms(_zero_centred(attention.q_norm), _zero_centred(attention.k_norm), is_gated=True),
        output=attention.o_proj.weight,
    )


def _feed_forward(mlp: nn.Module, scale: Tensor, config) -> SparseWeights | DenseWeights:
    if not has_router(mlp):
        return DenseWeights(scale, joined(mlp.gate_proj.weight, mlp.up_proj.weight), mlp.down_proj.weight)
    shared = mlp.shared_expert
    experts = ExpertWeights(
        gate_up=mlp.experts.gate_up_proj,
        down=mlp.experts.down_proj,
        shared_gate_up=joined(shared.gate_proj.weight, shared.up_proj.weight),
        shared_down=shared.down_proj.weight,
    )
    return SparseWeights(scale, joined(mlp.gate.weight, mlp.shared_expert_gate.weight), experts, mlp.gate.top_k)
