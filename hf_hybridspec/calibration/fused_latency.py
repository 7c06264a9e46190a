"""The two small latencies of the routing correction, on the kernels that captured rounds run (HybridSpec, A.2).

`latency.py` measures the same of the eager modules. On a GPU a work is captured several times over, so that what is
timed is long against the launch of a graph.
"""

from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from ..kernels.moe_experts import RoutedRows, add_experts, num_counters, route_rows
from ..kernels.residual_rows import ResidualRows, residual_rows
from ..modeling.block_state import BlockState
from ..modeling.fused_forward import FusedForward
from ..modeling.fused_weights import SparseWeights
from ..modeling.hybrid_cache import HybridCache
from .capture import Prompt
from .latency import slope

# Works of one captured graph.
TIMES_CAPTURED = 8


def fused_stage0_row(target: PreTrainedModel, prompt: Prompt, num_rows: int) -> float:
    """s: seconds that one more row adds to Stage 0 of at most `num_rows` rows, after a prompt; at least 0."""
    cache = HybridCache(target.config, prompt.input_ids.shape[1] + num_rows)
    with torch.no_grad():
        target(prompt.input_ids, cache=cache, logits_to_keep=1)
    return stage0_row_seconds(FusedForward(target), BlockState(cache), num_rows)


def stage0_row_seconds(forward: FusedForward, state: BlockState, num_rows: int) -> float:
    """As `fused_stage0_row`, on buffers that are there. Overwrites what `state` holds of a block."""
    device = forward.weights.embedding.device
    tokens = torch.arange(num_rows, device=device)
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    works = {length: partial(forward.stage0, tokens[:length], offset, state) for length in range(2, num_rows + 1)}
    return slope({length: repeated(work, device) for length, work in works.items()}, device) / num_times(device)


@torch.no_grad()
def expert_seconds(forward: FusedForward, num_rows: int) -> float:
    """eta: seconds that one more distinct expert adds to one MoE layer of `num_rows` rows; 0 for a dense target.

    Rows that repeat each other select the same experts, so that blocks of as many choices differ in the number of
    distinct ones. All MoE layers run in turn, so that no layer finds its weights in a cache.
    """
    blocks = [layer.feed_forward for layer in forward.weights.layers]
    blocks = [block for block in blocks if isinstance(block, SparseWeights)]
    if not blocks:
        return 0.0
    device, runs = forward.weights.embedding.device, {}
    for num_different in sorted({1, 2, 4, 8, num_rows} & set(range(1, num_rows + 1))):
        layers = [_ExpertLayer(forward, block, num_rows, num_different) for block in blocks]
        distinct = sum(layer.num_distinct for layer in layers) / len(layers)
        runs[distinct] = repeated(partial(_run_all, layers), device)
    return slope(runs, device) / (num_times(device) * len(blocks))


class _ExpertLayer:
    """The experts of one layer, for rows of which `num_different` differ."""

    def __init__(self, forward: FusedForward, block: SparseWeights, num_rows: int, num_different: int):
        table = forward.weights.embedding
        tokens = torch.arange(num_rows, device=table.device) % num_different
        self._eps, self._block = forward.weights.eps, block
        self._rows: ResidualRows = residual_rows(table, block.norm_scale, tokens)
        self._routed: RoutedRows = route_rows(self._rows, block.router, block.top_k, self._eps)
        self._room = ResidualRows.empty(num_rows, block.norm_scale, table.dtype)
        size = num_counters(table.shape[1], num_rows * block.top_k)
        self._counters = torch.zeros(size, dtype=torch.int32, device=table.device)

    @property
    def num_distinct(self) -> int:
        return self._routed.top_k_index.unique().numel()

    def run(self) -> None:
        add_experts(self._rows, self._routed, self._block.experts, self._room, self._eps, self._counters)


def _run_all(layers: list[_ExpertLayer]) -> None:
    for layer in layers:
        layer.run()


def num_times(device: torch.device) -> int:
    """How often `repeated` runs a work."""
    return TIMES_CAPTURED if device.type == "cuda" else 1


def repeated(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """What runs a work `num_times` over: on a GPU one captured graph, warmed up, elsewhere the work itself."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_times(device)):
            work()
    return partial(_replay, graph, work)


def _replay(graph: torch.cuda.CUDAGraph, _work: Callable[[], object]) -> None:
    """Replays a graph; `_work` is held because it holds the tensors that the graph reads."""
    graph.replay()
