"""Graphs that branch on the device: on a GPU every branch runs when it is chosen and only then."""

import ctypes

import pytest
import torch

from hf_hybridspec.generation import conditional_graphs
from hf_hybridspec.generation.conditional_graphs import ConditionalGraph, compile_setter, conditional_graph_obstacle

NUM_BRANCHES = 16


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    obstacle = conditional_graph_obstacle(device)
    if obstacle is not None:
        pytest.skip(obstacle)
    return device


def capture(run) -> torch.cuda.CUDAGraph:
    """A captured call of `run`, warmed up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
    return graph


def scalar(value: int, device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def test_the_cpu_is_an_obstacle_in_words():
    assert "cpu device" in conditional_graph_obstacle(torch.device("cpu"))


def test_a_missing_package_is_an_obstacle_in_words(monkeypatch):
    monkeypatch.setattr(conditional_graphs, "driver", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "pip install 'hf-hybridspec[cuda]'" in conditional_graph_obstacle(torch.device("cuda"))


@pytest.mark.peer
def test_the_bindings_take_what_we_give_them(monkeypatch):
    """Without a device: node parameters keep their values, and arguments reach the kernel's argument array."""
    driver = pytest.importorskip("cuda.bindings.driver")
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = driver.CUgraphConditionalHandle(77)
    params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_SWITCH
    params.conditional.size = NUM_BRANCHES
    assert (int(params.conditional.handle), params.conditional.size) == (77, NUM_BRANCHES)
    kernel = driver.CUDA_KERNEL_NODE_PARAMS()
    kernel.kernelParams = ((1 << 40, 1 << 41), (ctypes.c_ulonglong, ctypes.c_void_p))
    arguments = ctypes.cast(int(kernel.kernelParams), ctypes.POINTER(ctypes.c_void_p))
    assert [ctypes.c_ulonglong.from_address(arguments[index]).value for index in range(2)] == [1 << 40, 1 << 41]


@pytest.mark.peer
def test_the_setter_compiles():
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        code = compile_setter("sm_90")
    except RuntimeError as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    assert code[:4] == b"\x7fELF" and b"set_conditional" in code


@pytest.mark.gpu
def test_a_switch_runs_the_chosen_branch_alone(device):
    counts = torch.zeros(NUM_BRANCHES, dtype=torch.int32, device=device)
    before, after = scalar(0, device), scalar(0, device)
    selector = scalar(0, device)
    # Two graphs a branch: both run, in order.
    branches = [
        [capture(lambda i=i: counts[i].add_(1)), capture(lambda i=i: counts[i].mul_(3))] for i in range(NUM_BRANCHES)
    ]
    top = ConditionalGraph(device)
    prologue, epilogue = capture(lambda: before.add_(1)), capture(lambda: after.add_(1))
    top.add(prologue)
    top.add_switch(selector, branches)
    top.add(epilogue)
    top.instantiate()
    before.zero_(), after.zero_()
    chosen = [3, 0, 15, 3, 7, -1, 16, 1000]
    for choice in chosen + list(range(NUM_BRANCHES)):
        counts.zero_()
        selector.fill_(choice)
        top.launch()
        expected = [3 * (index == choice) for index in range(NUM_BRANCHES)]
        assert counts.tolist() == expected
    assert before.item() == after.item() == len(chosen) + NUM_BRANCHES


@pytest.mark.gpu
def test_the_graph_itself_chooses(device):
    """A prologue writes the selector that the SWITCH after it reads; launches queue up without a host read."""
    counts = torch.zeros(NUM_BRANCHES, dtype=torch.int32, device=device)
    selector = scalar(0, device)
    branches = [[capture(lambda i=i: counts[i].add_(1))] for i in range(NUM_BRANCHES)]

    def step():
        selector.add_(5).remainder_(NUM_BRANCHES)

    step_graph = capture(step)
    top = ConditionalGraph(device)
    top.add(step_graph)
    top.add_switch(selector, branches)
    top.instantiate()
    counts.zero_(), selector.zero_()
    for _ in range(2 * NUM_BRANCHES):
        top.launch()
    # 5 and 16 have no common factor: every branch comes once in 16 launches.
    assert counts.tolist() == [2] * NUM_BRANCHES


@pytest.mark.gpu
def test_a_loop_runs_until_its_condition_is_zero(device):
    counts = torch.zeros(NUM_BRANCHES, dtype=torch.int32, device=device)
    selector, left = scalar(0, device), scalar(0, device)
    branches = [[capture(lambda i=i: counts[i].add_(1))] for i in range(NUM_BRANCHES)]

    def count_down():
        left.sub_(1)
        selector.copy_(left)

    graph = capture(count_down)
    top = ConditionalGraph(device)
    with top.loop(left) as body:
        body.add(graph)
        body.add_switch(selector, branches)
    top.instantiate()
    for start in (5, 0, 16, 1):
        counts.zero_()
        left.fill_(start)
        top.launch()
        assert counts.tolist() == [int(index < start) for index in range(NUM_BRANCHES)]
        assert left.item() == 0


@pytest.mark.gpu
def test_a_copy_to_pinned_memory_in_a_branch_is_seen_without_synchronising(device):
    pinned = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    source = torch.arange(8, device=device)
    graph = capture(lambda: pinned.copy_(source, non_blocking=True))
    top = ConditionalGraph(device)
    top.add_switch(scalar(0, device), [[graph]])
    top.instantiate()
    torch.cuda.synchronize()
    pinned.zero_()
    top.launch()
    for _ in range(10**7):
        if pinned[7] == 7:
            break
    assert pinned.tolist() == list(range(8))


@pytest.mark.gpu
def test_a_selector_of_another_kind_is_refused(device):
    top = ConditionalGraph(device)
    with pytest.raises(ValueError, match=r"one int32 on a CUDA device, got torch\.int64"):
        top.add_switch(torch.zeros(1, dtype=torch.int64, device=device), [[]])


@pytest.mark.gpu
def test_launching_needs_instantiation(device):
    with pytest.raises(RuntimeError, match=r"call instantiate\(\) first"):
        ConditionalGraph(device).launch()
