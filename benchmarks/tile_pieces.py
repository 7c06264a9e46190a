"""The tiled kernels at one target's shapes, each as calls whose weights come from device memory, not from a cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hf_hybridspec.bench.scripted_routing import RoutingScript
from hf_hybridspec.kernels.gated_delta_inputs import ProducerWeights, gated_delta_inputs
from hf_hybridspec.kernels.linear import gated_linear, gated_norm_linear, norm_linear
from hf_hybridspec.kernels.moe_experts import ExpertWeights, RoutedRows, add_experts, num_counters, route_rows
from hf_hybridspec.kernels.residual_rows import ResidualRows, residual_rows

EPS = 1e-6
# Weights that one graph reads before it meets the same ones again: several times the 50 MB of an H200's L2 cache.
COLD_BYTES = 400e6
MAX_ROWS = 16
# Of a row's squares: tiles of 64 columns of 2048.
PARTS = 32
# Routings that take turns on one layer's experts.
ROUTINGS = 8


@dataclass(frozen=True)
class Shape:
    """What of a target the pieces need; the defaults are those of Qwen3.6-35B-A3B."""

    hidden: int = 2048
    num_k_heads: int = 16
    num_v_heads: int = 32
    k_dim: int = 128
    v_dim: int = 128
    num_query_heads: int = 16
    num_kv_heads: int = 2
    head_dim: int = 256
    num_experts: int = 256
    top_k: int = 8
    inner: int = 512
    vocabulary: int = 248320
    conv_kernel: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


TINY = Shape(
    hidden=64, num_k_heads=2, num_v_heads=4, k_dim=16, v_dim=16, num_query_heads=4, num_kv_heads=2, head_dim=32,
    num_experts=16, top_k=2, inner=32, vocabulary=128,
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A kernel, alone or with its neighbour, at one shape and number of rows.

    Attributes:
        kernel: its name in the table of tiles; of several that a call runs, the one whose tile is tuned.
        calls: run one after another; each returns its result.
        num_bytes: weights that a call reads, on average.
    """

    kernel: str
    calls: list[Callable[[], Tensor]]
    num_bytes: float


class Maker:
    """Builds pieces with random weights of one dtype on one device.

    Args:
        only_once: makes one call a piece, for compiling and for checks.
    """

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, only_once: bool = False):
        self.shape, self.device, self.dtype, self.only_once = shape, device, dtype, only_once
        self._layers: list[ExpertWeights] = []
        self._generator = torch.Generator(device=device).manual_seed(0)

    def piece(self, name: str, num_rows: int) -> Piece:
        """The piece `name` of PIECES with `num_rows` rows."""
        return PIECES[name](self, num_rows)

    def random(self, *sizes: int, scale: float = 1.0) -> Tensor:
        tensor = torch.empty(*sizes, device=self.device, dtype=self.dtype)
        return tensor.normal_(0, scale, generator=self._generator)

    def scale(self) -> Tensor:
        return 1 + 0.1 * self.random(self.shape.hidden).float()

    def residual(self, num_rows: int) -> ResidualRows:
        """Random rows, their squares in as many parts as most kernels leave."""
        rows = residual_rows(self.random(num_rows, self.shape.hidden), self.scale())
        return replace(rows, squares=rows.squares.expand(PARTS, -1) / PARTS)

    def room(self, num_rows: int) -> ResidualRows:
        return ResidualRows.empty(num_rows, self.scale(), self.dtype)

    def copies(self, num_bytes: int) -> int:
        return 1 if self.only_once else max(4, round(COLD_BYTES / num_bytes))

    def counters(self) -> Tensor:
        return torch.zeros(self.shape.hidden // 16, dtype=torch.int32, device=self.device)

    def projection(self, kernel: str, size_n: int, size_k: int, run: Callable[[Tensor], Tensor]) -> Piece:
        """`run` on copies of an `[N, K]` weight in turn."""
        num_bytes = size_n * size_k * self.dtype.itemsize
        weights = [self.random(size_n, size_k, scale=size_k**-0.5) for _ in range(self.copies(num_bytes))]
        return Piece(kernel, [lambda weight=weight: run(weight) for weight in weights], num_bytes)

    def experts(self) -> list[ExpertWeights]:
        """Two layers' experts, made once: together larger than any cache."""
        shape = self.shape
        while len(self._layers) < (1 if self.only_once else 2):
            self._layers.append(
                ExpertWeights(
                    self.random(shape.num_experts, 2 * shape.inner, shape.hidden, scale=shape.hidden**-0.5),
                    self.random(shape.num_experts, shape.hidden, shape.inner, scale=shape.inner**-0.5),
                    self.random(2 * shape.inner, shape.hidden, scale=shape.hidden**-0.5),
                    self.random(shape.hidden, shape.inner, scale=shape.inner**-0.5),
                )
            )
        return self._layers

    def routings(self, num_rows: int) -> list[RoutedRows]:
        """Routings with U ~ k w^0.66 distinct experts."""
        script = RoutingScript(ROUTINGS, self.shape.num_experts, self.shape.top_k)
        generator = np.random.default_rng(num_rows)
        assignments = script.assignments(script.draw(num_rows, generator), generator)
        return [
            scripted_rows(torch.from_numpy(index).to(self.device), self.shape.num_experts) for index in assignments
        ]


def scripted_rows(top_k_index: Tensor, num_experts: int) -> RoutedRows:
    """What the router would give for `[n, k]` chosen experts, all with the same weight."""
    (num_rows, top_k), device = top_k_index.shape, top_k_index.device
    routed = RoutedRows.empty(num_rows, top_k, num_experts, device)
    routed.top_k_index.copy_(top_k_index)
    routed.top_k_weights.fill_(1 / top_k)
    routed.shared_gate.fill_(0.5)
    positions = torch.arange(top_k, dtype=torch.int8, device=device)
    routed.slots.fill_(-1).scatter_(1, top_k_index.long(), positions.expand(num_rows, top_k))
    return routed


def count_distinct(routed: RoutedRows) -> int:
    """Distinct experts of all rows."""
    return int((routed.slots >= 0).any(dim=0).sum())


def _producer(maker: Maker, num_rows: int) -> Piece:
    shape, channels, heads = maker.shape, maker.shape.channels, maker.shape.num_v_heads
    rows = maker.residual(num_rows)
    conv_weight, state = maker.random(channels, shape.conv_kernel), maker.random(channels, shape.conv_kernel)
    conv_rows, gates = maker.random(MAX_ROWS, channels), maker.random(2, heads).float()

    def run(weight: Tensor) -> Tensor:
        weights = ProducerWeights(weight, conv_weight, gates[0], gates[1])
        return gated_delta_inputs(rows, weights, state, conv_rows, EPS).mixed

    return maker.projection("gated_delta_inputs", channels + heads * (shape.v_dim + 2), shape.hidden, run)


def _gated_delta_end(maker: Maker, num_rows: int) -> Piece:
    shape, heads, counters = maker.shape, (maker.shape.num_v_heads, maker.shape.v_dim), maker.counters()
    rows, gate, residual = (maker.random(num_rows, *size) for size in (heads, heads, (shape.hidden,)))
    norm_weight, room = maker.random(shape.v_dim), maker.room(num_rows)

    def run(weight: Tensor) -> Tensor:
        return gated_norm_linear(rows, gate, norm_weight, weight, residual, room, EPS, counters).scaled

    return maker.projection("gated_norm_linear", shape.hidden, heads[0] * heads[1], run)


def _attention_start(maker: Maker, num_rows: int) -> Piece:
    shape, rows = maker.shape, maker.residual(num_rows)
    size_n = 2 * (shape.num_query_heads + shape.num_kv_heads) * shape.head_dim
    return maker.projection("norm_linear", size_n, shape.hidden, lambda weight: norm_linear(rows, weight, EPS))


def _attention_end(maker: Maker, num_rows: int) -> Piece:
    shape, counters = maker.shape, maker.counters()
    heads, size = shape.num_query_heads, shape.head_dim
    rows, gate = maker.random(num_rows, heads, size), maker.random(num_rows, heads, 2 * size)[..., size:]
    residual, room = maker.random(num_rows, shape.hidden), maker.room(num_rows)

    def run(weight: Tensor) -> Tensor:
        return gated_linear(rows, gate, weight, residual, room, counters).scaled

    return maker.projection("gated_linear", shape.hidden, heads * size, run)


def _router(maker: Maker, num_rows: int) -> Piece:
    shape, rows = maker.shape, maker.residual(num_rows)

    def run(weight: Tensor) -> Tensor:
        return route_rows(rows, weight, shape.top_k, EPS).top_k_weights

    return maker.projection("router", shape.num_experts + 1, shape.hidden, run)


def _choice(maker: Maker, num_rows: int) -> Piece:
    """The same two launches, of which the second one's tile is tuned."""
    return replace(_router(maker, num_rows), kernel="choose_experts")


def _output_head(maker: Maker, num_rows: int) -> Piece:
    shape, rows = maker.shape, maker.residual(num_rows)
    return maker.projection(
        "wide_norm_linear", shape.vocabulary, shape.hidden, lambda weight: norm_linear(rows, weight, EPS)
    )


def _experts(kernel: str, maker: Maker, num_rows: int) -> Piece:
    """Both halves of the experts, of one launch; the tile of one of them is tuned."""
    rows, room = maker.residual(num_rows), maker.room(num_rows)
    size = num_counters(maker.shape.hidden, num_rows * maker.shape.top_k)
    counters = torch.zeros(size, dtype=torch.int32, device=maker.device)

    def run(routed: RoutedRows, weights: ExpertWeights) -> Tensor:
        return add_experts(rows, routed, weights, room, EPS, counters).scaled

    pairs = [(routed, weights) for routed in maker.routings(num_rows) for weights in maker.experts()]
    if maker.only_once:
        pairs = pairs[:1]
    read = float(np.mean([count_distinct(routed) + 1 for routed, _ in pairs]))
    num_bytes = read * 3 * maker.shape.inner * maker.shape.hidden * maker.dtype.itemsize
    return Piece(kernel, [partial(run, *pair) for pair in pairs], num_bytes)


# The largest share of a forward first: a search that runs out of time has found what matters most.
PIECES: dict[str, Callable[[Maker, int], Piece]] = {
    "expert_gate_up": partial(_experts, "expert_gate_up"),
    "gated_delta_inputs": _producer,
    "expert_down": partial(_experts, "expert_down"),
    "gated_norm_linear": _gated_delta_end,
    "wide_norm_linear": _output_head,
    "router": _router,
    "choose_experts": _choice,
    "norm_linear": _attention_start,
    "gated_linear": _attention_end,
}
