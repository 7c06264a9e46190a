"""The swapped GDN layer: the host's own forward outside a block, its equal within one."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from torch import nn
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_hybridspec import attach, detach
from hf_hybridspec.modeling.gated_delta_net import BlockGatedDeltaNet, block_class
from hf_hybridspec.modeling.target import gated_delta_nets
from tests.support import random_prompt

from .cache_helpers import ROWS, assert_close, prefilled, run, run_block

PROMPT = random_prompt(9, seed=5)


def mixer(target) -> nn.Module:
    return gated_delta_nets(target)[0][1]


def test_outside_a_block_it_is_the_hosts_own_forward(pair):
    """Bit by bit: without a cache, in a prefill with padding, and in a step."""
    stock, swapped = mixer(pair.stock), mixer(pair.attached)
    assert isinstance(swapped, BlockGatedDeltaNet) and not isinstance(stock, BlockGatedDeltaNet)
    hidden_states = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        assert torch.equal(stock(hidden_states), swapped(hidden_states))
        masked = swapped(hidden_states, attention_mask=mask)
        assert torch.equal(stock(hidden_states, attention_mask=mask), masked)
        assert not torch.equal(masked, swapped(hidden_states))
    one, other = prefilled(pair.stock, PROMPT), prefilled(pair.attached, PROMPT)
    assert torch.equal(run(pair.stock, one, ROWS[:, :1]), run(pair.attached, other, ROWS[:, :1]))


def test_only_a_block_takes_our_path(pair, monkeypatch):
    """A stock model would advance its state in a block; ours records."""
    calls = []
    monkeypatch.setattr(type(mixer(pair.attached)), "_project", _counted(type(mixer(pair.attached))._project, calls))
    cache = prefilled(pair.attached, PROMPT)
    run(pair.attached, cache, ROWS[:, :1])
    assert calls == []
    run_block(pair.attached, cache, ROWS[:, :3])
    assert len(calls) == 3


def _counted(method, calls):
    def call(self, hidden_states):
        calls.append(hidden_states.shape[1])
        return method(self, hidden_states)

    return call


HOST_MODULES = {"qwen3_next": modeling_qwen3_next, "qwen3_5_moe": modeling_qwen3_5_moe}


@pytest.mark.parametrize("kind", HOST_MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_and_gates_are_the_hosts(kind, dtype, target_pairs, monkeypatch):
    """Bit by bit what the host hands to its recurrence. Beta is rounded to the activation dtype before fp32."""
    seen = {}

    def spy(query, key, value, g, beta, **_):
        seen.update(g=g, beta=beta)
        return torch.zeros_like(value), None

    def spy_conv(x, *_, **__):
        seen.update(rows=x)
        return x

    monkeypatch.setattr(HOST_MODULES[kind], "torch_chunk_gated_delta_rule", spy)
    monkeypatch.setattr(HOST_MODULES[kind], "causal_conv1d_fn", spy_conv)
    hidden_states = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    stock = copy.deepcopy(mixer(target_pairs[kind].stock)).to(dtype)
    swapped = copy.deepcopy(mixer(target_pairs[kind].attached)).to(dtype)
    with torch.no_grad():
        stock(hidden_states)
        inputs = swapped._project(hidden_states)
    assert torch.equal(inputs.rows, seen["rows"].transpose(1, 2))
    assert torch.equal(inputs.log_decay, seen["g"]) and inputs.log_decay.dtype == torch.float32
    assert torch.equal(inputs.beta, seen["beta"]) and inputs.beta.dtype == dtype


def test_bf16_blocks_follow_bf16_steps(pair):
    """One block against the host's own chunked forward of the same rows, both in bf16: within a few roundings."""
    stock, attached = copy.deepcopy(pair.stock).bfloat16(), copy.deepcopy(pair.attached).bfloat16()
    expected = run(stock, prefilled(stock, PROMPT), ROWS[:, :8]).float()
    cache = prefilled(attached, PROMPT)
    actual = run_block(attached, cache, ROWS[:, :8]).float()
    # Weights of 0.2 and near-ties of the router let single logits move; the rows as a whole must not.
    error = (actual - expected).norm() / expected.norm()
    assert error < 0.1, error
    assert cache.layers[0].conv_states[0].dtype == torch.bfloat16
    assert cache.layers[0].recurrent_states[0].dtype == torch.float32


@pytest.mark.parametrize("hooks_come_first", [True, False])
def test_weights_offloaded_by_accelerate(pair, hooks_come_first):
    """Its hooks hold the forward of the class; and the convolution weight is read without calling its module."""
    target = copy.deepcopy(pair.stock)
    if hooks_come_first:
        cpu_offload(target, execution_device=torch.device("cpu"))
    attach(target)
    if not hooks_come_first:
        cpu_offload(target, execution_device=torch.device("cpu"))
    assert mixer(target).conv1d.weight.device.type == "meta"
    expected = run_block(pair.attached, prefilled(pair.attached, PROMPT), ROWS[:, :5])
    cache = prefilled(target, PROMPT)
    assert_close(run_block(target, cache, ROWS[:, :5]), expected)
    cache.commit(2)
    # Without hooks the forward stays in the instance; the next swaps reach it as well.
    remove_hook_from_submodules(target)
    assert_close(run_block(target, prefilled(target, PROMPT), ROWS[:, :5]), expected)
    detach(target)
    assert mixer(target).forward.__func__ is type(mixer(pair.stock)).forward
    assert_close(run_block(attach(target), prefilled(target, PROMPT), ROWS[:, :5]), expected)


def test_the_class_keeps_the_hosts_name():
    host_class = modeling_qwen3_next.Qwen3NextGatedDeltaNet
    swapped = block_class(host_class)
    assert (swapped.__name__, swapped.__module__) == (host_class.__name__, host_class.__module__)
    assert issubclass(swapped, host_class) and block_class(host_class) is swapped
    with pytest.raises(KeyError):
        block_class(nn.Linear)
