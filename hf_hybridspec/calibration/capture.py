"""The capture run: greedy decoding at full length, watched from outside the loop.

A length policy that always verifies every draft sees the drafter's signals; forward hooks on the routers see the
experts of every row. The loop itself is the one that users run.
"""

from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from ..generation.policy_base import LengthPolicy
from ..modeling.drafter import Draft, Drafter
from ..modeling.sparse_moe import has_router
from ..modeling.target import text_model
from .rounds import CapturedRound, PromptRounds, RoundFile


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to decode.

    Attributes:
        key: hash of the text and how it was rendered.
        kind: its category.
        input_ids: `[1, n]` int64.
    """

    key: str
    kind: str
    input_ids: torch.Tensor


class RoundRecorder(LengthPolicy):
    """Verifies every draft, and notes signals and expert assignments of each round.

    Use as a context manager around generate(): inside it, the routers of `target` are watched.

    Attributes:
        drafts: one Draft for each round.
        assignments: for each round, `[rows, k]` int64 of every MoE layer, in layer order.
    """

    name = "full"

    def __init__(self, target: PreTrainedModel):
        layers = text_model(target).layers
        self._routers: list[nn.Module] = [layer.mlp.gate for layer in layers if has_router(layer.mlp)]
        self._handles = []
        self.drafts: list[Draft] = []
        self.assignments: list[list[torch.Tensor]] = []

    def __enter__(self) -> "RoundRecorder":
        self.drafts, self.assignments = [], []
        for router in self._routers:
            self._handles.append(router.register_forward_hook(self._record))
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def select(self, draft: Draft) -> int:
        self.drafts.append(draft)
        self.assignments.append([])
        return draft.tokens.shape[0] + 1

    def _record(self, module: nn.Module, args, output) -> None:
        # Before the first round, the prefill passes through the routers too.
        if self.assignments:
            self.assignments[-1].append(output[2])


def capture(
    target: PreTrainedModel, drafter: Drafter, prompts: list[Prompt], max_new_tokens: int, file: RoundFile
) -> list[PromptRounds]:
    """Decodes every prompt that `file` does not hold yet, appends its rounds, and returns those of all `prompts`.

    Rounds in which an end of sequence or the limit cut what could be accepted are left out, the last one always.
    """
    recorder = RoundRecorder(target)
    for prompt in tqdm(prompts, desc="capture", unit="prompt"):
        if prompt.key not in file.finished:
            file.append(capture_prompt(target, drafter, prompt, max_new_tokens, recorder))
    return [file.finished[prompt.key] for prompt in prompts]


def capture_prompt(
    target: PreTrainedModel, drafter: Drafter, prompt: Prompt, max_new_tokens: int, recorder: RoundRecorder
) -> PromptRounds:
    """The rounds of one prompt."""
    with recorder:
        target.generate(
            prompt.input_ids,
            generation_config=GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False),
            assistant_model=drafter,
            length_policy=recorder,
            decoding_path="round",
        )
    statistics = target.generation_statistics
    rounds = []
    # The last round ends the answer: what it would have accepted beyond is unknown.
    for index in range(statistics.rounds - 1):
        if statistics.verification_lengths[index] == drafter.num_draft_tokens + 1:
            rounds.append(_round(recorder.drafts[index], statistics.emitted[index], recorder.assignments[index]))
    return PromptRounds(prompt.key, prompt.kind, statistics.rounds - len(rounds), tuple(rounds))


def _round(draft: Draft, num_emitted: int, assignments: list[torch.Tensor]) -> CapturedRound:
    new = [new_experts(top_k_index)[1:] for top_k_index in assignments]
    none = [0] * draft.tokens.shape[0]
    return CapturedRound(
        confidence=tuple(draft.confidence.tolist()),
        entropy=tuple(draft.entropy.tolist()),
        acceptance=None if draft.acceptance is None else tuple(draft.acceptance.tolist()),
        num_accepted=num_emitted - 1,
        new_layer0=tuple(new[0].tolist() if new else none),
        new_pairs=tuple(torch.stack(new).sum(dim=0).tolist() if new else none),
    )


def new_experts(top_k_index: torch.Tensor) -> torch.Tensor:
    """`[n]` int64: how many of each row's experts `[n, k]` no earlier row selects."""
    same = top_k_index[:, :, None, None] == top_k_index
    earlier = torch.ones(top_k_index.shape[0], top_k_index.shape[0], device=same.device).tril(-1).bool()
    is_known = (same & earlier[:, None, :, None]).any(dim=3).any(dim=2)
    return (~is_known).sum(dim=1)
