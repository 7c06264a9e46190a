"""C12, C13: one row is verified bit for bit as it is decoded; extreme decays stay finite."""

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_recurrent_gated_delta_rule

from hf_hybridspec import HybridCache, attach
from hf_hybridspec.kernels.gated_delta_rule import (
    CompactFactors,
    commit_gated_delta_rule,
    verify_gated_delta_rule,
)
from hf_hybridspec.modeling.hybrid_cache import GatedDeltaLayer
from tests.support import random_prompt, random_target

HEADS, VALUE_HEADS, DIM = 2, 4, 128


def one_row(rows: int = 1, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "query": randn(1, rows, HEADS, DIM).to(dtype),
        "key": randn(1, rows, HEADS, DIM).to(dtype),
        "value": randn(1, rows, VALUE_HEADS, DIM).to(dtype),
        "log_decay": -randn(1, rows, VALUE_HEADS).abs(),
        "state": randn(1, VALUE_HEADS, DIM, DIM),
    }


def factors_for(rows: int, num_layers: int = 1) -> CompactFactors:
    return CompactFactors.empty(
        num_layers, 1, rows, num_k_heads=HEADS, num_v_heads=VALUE_HEADS, k_dim=DIM, v_dim=DIM, device="cpu"
    )


def verify(inputs: dict, beta: torch.Tensor, factors: CompactFactors) -> torch.Tensor:
    return verify_gated_delta_rule(
        inputs["query"], inputs["key"], inputs["value"], inputs["log_decay"], beta, inputs["state"], factors[0]
    )


def test_c12_one_row_equals_the_decode_step_bit_for_bit():
    inputs = one_row()
    # b = -0.5: its sigmoid 0.3775 is no bf16 number, so where it is rounded matters.
    b = torch.full((1, 1, VALUE_HEADS), -0.5, dtype=torch.bfloat16)
    expected, state = torch_recurrent_gated_delta_rule(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        g=inputs["log_decay"],
        beta=b.sigmoid(),
        initial_state=inputs["state"].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    factors = factors_for(1)
    output = verify(inputs, b.sigmoid(), factors)
    assert torch.equal(output, expected)
    # The fault: beta in fp32 on one of the two sides.
    assert not torch.equal(verify(inputs, b.float().sigmoid(), factors_for(1)), expected)
    committed = inputs["state"].clone()[None]
    commit_gated_delta_rule(committed, factors, 1)
    assert torch.equal(committed[0], state)


@torch.no_grad()
def test_c12_a_block_of_one_row_in_a_bf16_model_equals_its_decode_step():
    model = attach(random_target("qwen3_5").to(torch.bfloat16))
    tokens = random_prompt(10)
    logits, recurrent_states = [], []
    for is_block in (False, True):
        cache = HybridCache(model.config)
        model(tokens[:, :9], cache=cache)
        if is_block:
            cache.begin_block(1)
        logits.append(model(tokens[:, 9:], cache=cache).logits)
        if is_block:
            cache.commit(1)
        recurrent_states.append(
            torch.stack([layer.recurrent_states[0] for layer in cache.layers if isinstance(layer, GatedDeltaLayer)])
        )
    assert torch.equal(*logits)
    assert torch.equal(*recurrent_states)


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_c13_strong_and_weak_decay_in_one_block(rows):
    inputs = one_row(rows, torch.float32)
    pattern = torch.tensor([-50.0, -1e-6, -0.3, -50.0, 0.0])
    inputs["log_decay"] = pattern.repeat(rows * VALUE_HEADS)[: rows * VALUE_HEADS].reshape(1, rows, VALUE_HEADS)
    beta = torch.full((1, rows, VALUE_HEADS), 0.6)
    factors = factors_for(rows)
    output = verify(inputs, beta, factors)
    committed = inputs["state"].clone()[None]
    commit_gated_delta_rule(committed, factors, rows)
    expected, state = torch_recurrent_gated_delta_rule(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        g=inputs["log_decay"],
        beta=beta,
        initial_state=inputs["state"].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert output.isfinite().all() and committed.isfinite().all()
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(committed[0], state, atol=1e-5, rtol=1e-5)
