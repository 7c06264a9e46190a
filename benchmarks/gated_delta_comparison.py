"""Peers of the GDN benchmark: their errors, the launch of ReplaySSM that is fastest for one request, their rounds."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch

from benchmarks.gated_delta_layers import LayerRows, Shape, recurrence, relative_error
from benchmarks.gated_delta_peers import PEERS, Peer, Replay
from benchmarks.peer_kernels import PeerKernels
from benchmarks.replay import Captured, medians, times_in_turn

TUNED = "sglang_replayssm_tuned"
# Relative error of outputs or states above which a peer was called wrongly; their own rounding stays below 2e-3.
SAME_FUNCTION = 1e-2
# Tiles of value columns, warps and slices of K; larger tiles with fewer warps spill.
LAUNCHES = tuple(
    {"block_v": block_v, "num_warps": warps, "nk": slices}
    for block_v, warps, slices in product((16, 32, 64), (1, 2, 4), (1, 2, 4))
    if block_v < 64 or warps == 4
)


@dataclass(frozen=True)
class Work:
    """Captured rounds, and how many of them."""

    captured: Captured
    num_rounds: int


def peer_work(peer: Peer, rows: LayerRows, state_sets: list[torch.Tensor]) -> Work:
    """Whole cycles of a peer on every set of states, one round on each set after another."""
    # A random state is one in either layout.
    layouts = [states.view_as(states.mT) if peer.value_first else states for states in state_sets]
    rounds = [peer.bind(states) for states in layouts] * peer.rounds_in_cycle

    def run() -> None:
        for one in rounds:
            one(rows)

    return Work(Captured(run), len(rounds))


@dataclass
class Comparison:
    """Peers at the given numbers of rows.

    Attributes:
        launches: rows -> launch of ReplaySSM that is compared beside its own, once `tune` has found it.
    """

    kernels: PeerKernels
    shape: Shape
    lengths: tuple[int, ...]
    dtype: torch.dtype
    launches: dict[int, dict[str, int]] = field(default_factory=dict)

    def peers(self, rows: int) -> Iterator[tuple[str, Peer]]:
        """Each peer with its buffers, made when it is asked for."""
        arguments = (self.kernels, self.shape, rows, self.dtype)
        for name, make in PEERS.items():
            yield name, make(*arguments)
        if rows in self.launches:
            yield TUNED, Replay(*arguments, launch=self.launches[rows])

    def candidates(self, rows: int) -> list[Replay]:
        """ReplaySSM with every launch that `tune` tries; a product of slices needs 16 values of K."""
        launches = [launch for launch in LAUNCHES if self.shape.k_dim // launch["nk"] >= 16]
        return [Replay(self.kernels, self.shape, rows, self.dtype, launch=launch) for launch in launches]

    def errors(self) -> dict[str, dict[int, dict[str, float]]]:
        """Relative errors of outputs and states by peer and number of rows, over one cycle."""
        errors: dict[str, dict[int, dict[str, float]]] = {}
        for rows in self.lengths:
            for name, peer in self.peers(rows):
                errors.setdefault(name, {})[rows] = peer_errors(peer, self.shape, rows, self.dtype)
        return errors

    def tune(self, state_sets: list[torch.Tensor], replays: int) -> None:
        """Takes, at every number of rows, the fastest launch that computes the recurrence."""
        for rows in self.lengths:
            inputs, peers = self.shape.rows(rows, self.dtype), self.candidates(rows)
            works = {str(i): peer_work(peer, inputs, state_sets).captured for i, peer in enumerate(peers)}
            times = medians(times_in_turn(works, replays))
            for index in sorted(times, key=times.get):
                peer = peers[int(index)]
                if is_right(peer_errors(peer, self.shape, rows, self.dtype)):
                    self.launches[rows] = peer.launch
                    break

    def works(self, state_sets: list[torch.Tensor]) -> dict[str, Work]:
        """Captured rounds by "ROWS NAME"."""
        works = {}
        for rows in self.lengths:
            inputs = self.shape.rows(rows, self.dtype)
            for name, peer in self.peers(rows):
                works[f"{rows} {name}"] = peer_work(peer, inputs, state_sets)
        return works


def peer_errors(peer: Peer, shape: Shape, rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Against the fp32 recurrence on the same rows, through one cycle of rounds."""
    expected_states = shape.states()
    states = (expected_states.mT if peer.value_first else expected_states).clone(memory_format=torch.contiguous_format)
    run, outputs, expected = peer.bind(states), [], []
    for _ in range(peer.rounds_in_cycle):
        inputs = shape.rows(rows, dtype)
        outputs.append(torch.stack([output.view_as(inputs.value[0]) for output in run(inputs)]))
        seen = inputs.with_unrounded_beta() if peer.beta_is_unrounded else inputs
        expected.append(recurrence(shape, seen, expected_states))
    return {
        "output": relative_error(torch.cat(outputs, dim=2), torch.cat(expected, dim=2)),
        "state": relative_error(states.mT if peer.value_first else states, expected_states),
    }


def is_right(errors: dict[str, float]) -> bool:
    """Whether a peer's errors are those of rounding; a NaN is not."""
    return all(error <= SAME_FUNCTION for error in errors.values())


def verdict(ours_ms: float, peers_ms: dict[str, float], errors: dict[str, dict[str, float]]) -> dict:
    """What a record of results says of the peers; the best is the fastest that is right.

    Args:
        errors: output and state error by peer, for the same number of rows.
    """
    best = min((name for name in peers_ms if is_right(errors[name])), key=peers_ms.get, default=None)
    return {
        "peers_ms": {name: round(ms, 4) for name, ms in peers_ms.items()},
        "best_peer": best,
        "speedup_over_best_peer": None if best is None else round(peers_ms[best] / ours_ms, 3),
    }
