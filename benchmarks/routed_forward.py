"""Forwards of a target whose routing is counted, and scripted where the script says so; each captured."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.replay import Captured
from benchmarks.tile_pieces import count_distinct, scripted_rows
from hf_hybridspec.bench.scripted_routing import RoutingScript
from hf_hybridspec.kernels.moe_experts import RoutedRows
from hf_hybridspec.modeling.block_state import BlockState
from hf_hybridspec.modeling.fused_forward import FusedForward
from hf_hybridspec.modeling.split_forward import VerifiedRows


class RoutedForward(FusedForward):
    """A fused forward whose routings are counted, and replaced where there is a script.

    Attributes:
        routings: layer -> its routing, as the newest call or replay has left it.
        script: layer -> what takes the place of the router's choice; None leaves it.
    """

    script: list[RoutedRows] | None = None

    def stage0(self, token_ids, position_offset, state):
        self.routings: list[RoutedRows] = []
        boundary = super().stage0(token_ids, position_offset, state)
        if self.script is None:
            return boundary
        self.routings = [self.script[0]]
        return replace(boundary, routed=self.script[0])

    def _route(self, block, hidden, room=None):
        routed = super()._route(block, hidden, room)
        if self.script is not None:
            routed = self.script[len(self.routings)]
        self.routings.append(routed)
        return routed


@dataclass(frozen=True)
class Forward:
    """A captured forward of one length and kind of routing.

    Attributes:
        draw: makes the next replay another one: other tokens, or another script.
        count: distinct experts of a layer in the newest replay, on average.
    """

    captured: Captured
    draw: Callable[[int], None]
    count: Callable[[], float]


class Capturer:
    """Captures forwards of one target.

    Args:
        config: of the target's text model.
    """

    def __init__(self, forward: RoutedForward, config):
        self.forward, self.config = forward, config
        self.device = forward.weights.embedding.device

    def offset(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self.device)

    def tokens(self, length: int, turn: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * turn + length)
        return torch.randint(self.config.vocab_size, (length,), generator=generator).to(self.device)

    def assignments(self, length: int, turn: int) -> list[torch.Tensor]:
        """Scripted experts `[w, k]` of every layer."""
        config = self.config
        script = RoutingScript(config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
        generator = np.random.default_rng(1000 * turn + length)
        index = script.assignments(script.draw(length, generator), generator)
        return list(torch.from_numpy(index).to(self.device))

    def capture(self, state: BlockState, length: int, routing: str) -> Forward:
        """A forward of `length` rows."""
        forward, tokens, offset = self.forward, self.tokens(length, 0), self.offset()
        script = None
        if routing == "scripted":
            script = [scripted_rows(index, self.config.num_experts) for index in self.assignments(length, 0)]

        def work() -> list[VerifiedRows | RoutedRows]:
            forward.script = script
            rows = forward.stage1(forward.stage0(tokens, offset, state), length, state)
            forward.script = None
            return [rows, *forward.routings]

        captured = Captured(work)

        def draw(turn: int) -> None:
            tokens.copy_(self.tokens(length, turn))
            for routed, index in zip(script or (), self.assignments(length, turn) if script else (), strict=True):
                drawn = scripted_rows(index, self.config.num_experts)
                for name in vars(routed):
                    getattr(routed, name).copy_(getattr(drawn, name))

        def count() -> float:
            # The buffers of Layer 0 are those of every forward.
            routings = script or captured.result[2:]
            return float(np.mean([count_distinct(routed) for routed in routings]))

        return Forward(captured, draw, count)
