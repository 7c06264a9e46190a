"""The drafter's forward written down row by row in float64, from tensors and configuration alone (an oracle)."""

import math

import torch
from torch import Tensor

from hf_hybridspec.modeling.drafter_config import DrafterConfig


def rope_angles(config: DrafterConfig) -> tuple[list[float], float]:
    """Angle per position of each pair of channels, and the factor on cos and sin (YaRN by its definition)."""
    rope, dim = config.rope_parameters, config.head_dim
    base = [rope["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)]
    if rope["rope_type"] == "default":
        return base, 1.0

    def boundary(turns: float) -> float:
        length = rope["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low = max(math.floor(boundary(rope["beta_fast"])), 0)
    high = min(math.ceil(boundary(rope["beta_slow"])), dim - 1)
    angles = []
    for i, angle in enumerate(base):
        interpolated = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
        angles.append(angle * (1 - interpolated) + angle / rope["factor"] * interpolated)
    return angles, 0.1 * math.log(rope["factor"]) + 1.0


def rotate(vector: Tensor, position: int, config: DrafterConfig) -> Tensor:
    angles, factor = rope_angles(config)
    half = config.head_dim // 2
    turned = vector.clone()
    for i, angle in enumerate(angles):
        cos, sin = factor * math.cos(position * angle), factor * math.sin(position * angle)
        turned[i] = vector[i] * cos - vector[i + half] * sin
        turned[i + half] = vector[i + half] * cos + vector[i] * sin
    return turned


def norm(vector: Tensor, weight: Tensor, config: DrafterConfig) -> Tensor:
    return vector / torch.sqrt(vector.square().mean() + config.rms_norm_eps) * weight


def sees(config: DrafterConfig, layer: int, query: int, key: int) -> bool:
    """Whether a block row at position `query` sees position `key` (context or block) in a layer."""
    slides = config.layer_types[layer] == "sliding_attention"
    causal = slides if config.is_causal is None else config.is_causal
    if causal and key > query:
        return False
    return not slides or abs(query - key) < config.sliding_window


def naive_hidden(config: DrafterConfig, tensors: dict[str, Tensor], features: Tensor, rows: Tensor) -> Tensor:
    """Block rows [B, H] (embedded) after context features [S, K*H] at positions 0..S-1 -> hidden [B, H] after norm."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    S, B = features.shape[0], rows.shape[0]
    context = [norm(w["fc.weight"] @ row.double(), w["hidden_norm.weight"], config) for row in features]
    hidden = [row.double() for row in rows]
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for layer in range(config.num_hidden_layers):
        p = f"layers.{layer}."
        normed = [norm(h, w[p + "input_layernorm.weight"], config) for h in hidden]
        keys, values = [], []
        for position, row in enumerate(context + normed):
            k = (w[p + "self_attn.k_proj.weight"] @ row).view(kv_heads, dim)
            keys.append([rotate(norm(head, w[p + "self_attn.k_norm.weight"], config), position, config) for head in k])
            values.append((w[p + "self_attn.v_proj.weight"] @ row).view(kv_heads, dim))
        for j in range(B):
            q = (w[p + "self_attn.q_proj.weight"] @ normed[j]).view(heads, dim)
            visible = [t for t in range(S + B) if sees(config, layer, S + j, t)]
            out = []
            for head in range(heads):
                group = head // (heads // kv_heads)
                query = rotate(norm(q[head], w[p + "self_attn.q_norm.weight"], config), S + j, config)
                scores = torch.stack([query @ keys[t][group] for t in visible]) / math.sqrt(dim)
                weights = scores.softmax(0)
                out.append(sum(weight * values[t][group] for weight, t in zip(weights, visible, strict=True)))
            hidden[j] = hidden[j] + w[p + "self_attn.o_proj.weight"] @ torch.cat(out)
        for j in range(B):
            x = norm(hidden[j], w[p + "post_attention_layernorm.weight"], config)
            gate, up = w[p + "mlp.gate_proj.weight"] @ x, w[p + "mlp.up_proj.weight"] @ x
            hidden[j] = hidden[j] + w[p + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    return torch.stack([norm(h, w["norm.weight"], config) for h in hidden])
