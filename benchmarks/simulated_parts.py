"""Drafting and acceptance with outcomes from recorded or drawn rounds, everything else really computed."""

from dataclasses import replace

import torch

from benchmarks.scripted_forward import ExpertScript
from hf_hybridspec.calibration.rounds import RoundArrays
from hf_hybridspec.generation.device_round import GreedyAcceptance
from hf_hybridspec.kernels.round_steps import RoundState
from hf_hybridspec.modeling.draft import Draft
from hf_hybridspec.modeling.fused_drafter import FusedDrafter


class Trace:
    """Recorded rounds on a device, for as many drafts as the drafter proposes.

    Attributes:
        signals: `[N, 2, D]` fp32, confidence and entropy.
        num_accepted: `[N]` int32, of all drafts.
    """

    def __init__(self, rounds: RoundArrays, num_drafts: int, device: torch.device):
        signals = [torch.from_numpy(rows[:, :num_drafts]) for rows in (rounds.confidence, rounds.entropy)]
        self.signals = torch.stack(signals, dim=1).to(device, torch.float32)
        self.num_accepted = torch.from_numpy(rounds.num_accepted).to(device, torch.int32)
        self._start = torch.zeros(1, dtype=torch.int64, device=device)
        self._count = torch.full_like(self._start, rounds.num_rounds)

    def take(self, start: int, count: int) -> None:
        """Limits the next sequences to `count` records from `start` on. No round may be under way."""
        self._start.fill_(start)
        self._count.fill_(count)

    def record(self, round_index: torch.Tensor) -> torch.Tensor:
        """`[1]` int64, the record of a round `[1]` int64 of the sequence; after the last one the first follows."""
        return self._start + round_index % self._count


class SimulatedDrafter:
    """A fused drafter whose signals are those of the round's record; its tokens stay its own.

    Args:
        script: of experts, moved on with every proposal; None leaves routing to the router.

    Attributes:
        round_index: `[1]` int64 on the device, as the round's state counts.
    """

    def __init__(self, fused: FusedDrafter, trace: Trace, script: ExpertScript | None):
        self.fused, self.num_draft_tokens, self._trace, self._script = fused, fused.num_draft_tokens, trace, script
        self.round_index: torch.Tensor | None = None

    def propose(self, anchor, recurrent_states) -> Draft:
        if self._script is not None:
            self._script.advance(self.round_index)
        draft = self.fused.propose(anchor, recurrent_states)
        signals = self._trace.signals.index_select(0, self._trace.record(self.round_index))[0]
        return replace(draft, confidence=signals[0], entropy=signals[1])

    def observe(self, features, commit_length) -> None:
        self.fused.observe(features, commit_length)


class SimulatedAcceptance(GreedyAcceptance):
    """Greedy acceptance, of which the number of accepted drafts is replaced by the record's, cut to the length."""

    kind = "simulated"

    def __init__(self, trace: Trace):
        self._trace = trace

    def accept(self, logits: torch.Tensor, state: RoundState) -> None:
        super().accept(logits, state)
        recorded = self._trace.num_accepted.index_select(0, self._trace.record(state.round_index))
        state.num_accepted.copy_(recorded.clamp(max=logits.shape[0] - 1))
