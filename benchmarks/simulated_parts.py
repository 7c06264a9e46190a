"""Drafting and acceptance with outcomes from recorded or drawn rounds, everything else really computed."""

from dataclasses import replace

import torch

from benchmarks.scripted_forward import ExpertScript
from hf_hybridspec.calibration.rounds import RoundArrays
from hf_hybridspec.generation.device_round import GreedyAcceptance
from hf_hybridspec.kernels.round_steps import RoundState
from hf_hybridspec.modeling.draft import Draft
from hf_hybridspec.modeling.fused_drafter import FusedDrafter


class SimulatedDrafter:
    """A fused drafter whose signals are those of the round's record; its tokens stay its own.

    Args:
        round_index: `[1]` int64 on the device, as the round's state counts.
        script: of experts, moved on with every proposal; None leaves routing to the router.
    """

    def __init__(self, fused: FusedDrafter, rounds: RoundArrays, script: ExpertScript | None):
        self.fused, self.num_draft_tokens, self._script = fused, fused.num_draft_tokens, script
        device, drafts = fused.committed.device, fused.num_draft_tokens
        self._signals = torch.stack(
            [torch.from_numpy(rounds.confidence[:, :drafts]), torch.from_numpy(rounds.entropy[:, :drafts])], dim=1
        ).to(device, torch.float32)
        self.round_index: torch.Tensor | None = None

    def propose(self, anchor, recurrent_states) -> Draft:
        if self._script is not None:
            self._script.advance(self.round_index)
        draft = self.fused.propose(anchor, recurrent_states)
        signals = self._signals.index_select(0, self.round_index % self._signals.shape[0])[0]
        return replace(draft, confidence=signals[0], entropy=signals[1])

    def observe(self, features, commit_length) -> None:
        self.fused.observe(features, commit_length)


class SimulatedAcceptance(GreedyAcceptance):
    """Greedy acceptance, of which the number of accepted drafts is replaced by the record's, cut to the length."""

    kind = "simulated"

    def __init__(self, rounds: RoundArrays, device: torch.device):
        self._num_accepted = torch.from_numpy(rounds.num_accepted).to(device, torch.int32)

    def accept(self, logits: torch.Tensor, state: RoundState) -> None:
        super().accept(logits, state)
        recorded = self._num_accepted.index_select(0, state.round_index % self._num_accepted.shape[0])
        state.num_accepted.copy_(recorded.clamp(max=logits.shape[0] - 1))
