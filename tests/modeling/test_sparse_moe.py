"""The router apart from the experts."""

import pytest
import torch

from hf_hybridspec.modeling.sparse_moe import Routing, has_router, route, run_experts
from hf_hybridspec.modeling.target import text_model

HIDDEN_STATES = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(0))


def mlp_of(pair):
    return text_model(pair.attached).layers[0].mlp


@torch.no_grad()
def test_router_and_experts_together_are_the_hosts_block(pair):
    mlp = mlp_of(pair)
    output = run_experts(mlp, HIDDEN_STATES, route(mlp, HIDDEN_STATES))
    torch.testing.assert_close(output, mlp(HIDDEN_STATES), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_the_first_rows_of_a_routing_run_alone(pair):
    mlp = mlp_of(pair)
    routing = route(mlp, HIDDEN_STATES)
    first = None if routing is None else routing.first(4)
    output = run_experts(mlp, HIDDEN_STATES[:, :4], first)
    torch.testing.assert_close(output, mlp(HIDDEN_STATES)[:, :4], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_routing_is_what_decides(target_pairs):
    """Another assignment, another output: the router is not run again."""
    mlp = mlp_of(target_pairs["qwen3_5_moe"])
    routing = route(mlp, HIDDEN_STATES)
    other = Routing(routing.router_logits, (routing.top_k_index + 1) % 8, routing.top_k_weights)
    calls = []
    handle = mlp.gate.register_forward_hook(lambda *_: calls.append(1))
    difference = run_experts(mlp, HIDDEN_STATES, other) - run_experts(mlp, HIDDEN_STATES, routing)
    handle.remove()
    assert difference.abs().amax() > 1e-3 and not calls


@torch.no_grad()
def test_shapes_and_dense_layers(pair):
    mlp = mlp_of(pair)
    routing = route(mlp, HIDDEN_STATES)
    assert has_router(mlp) == (pair.kind != "qwen3_5") == (routing is not None)
    if routing is not None:
        assert routing.router_logits.shape == (11, 8)
        assert routing.top_k_index.shape == routing.top_k_weights.shape == (11, 2)


@pytest.mark.parametrize(("num_rows", "expected"), [(0, 0), (1, 2), (2, 3), (3, 3), (4, 5)])
def test_distinct_experts(num_rows, expected):
    index = torch.tensor([[0, 3], [3, 7], [7, 0], [1, 2]])
    routing = Routing(torch.zeros(4, 8), index, torch.zeros(4, 2))
    assert int(routing.num_distinct(num_rows)) == expected
    assert int(routing.first(2).num_distinct(2)) == 3
