"""TokenVerifier: what it accepts, and what it shows to logits processors."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

from hf_hybridspec.generation.verification import TokenVerifier

PROMPT = torch.tensor([[1, 2, 3]])
# The target's argmax after the anchor and after each draft is 4, 0, 2, 1.
LOGITS = torch.nn.functional.one_hot(torch.tensor([4, 0, 2, 1]), 5).to(torch.bfloat16) * 3


class Recorder(LogitsProcessor):
    """Adds one to token 3 for every token seen, and notes the prefixes."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores[:, 3] += 1
        return scores


@pytest.mark.parametrize(
    ("drafts", "emitted"),
    [([4, 0, 2], [4, 0, 2, 1]), ([4, 0, 1], [4, 0, 2]), ([4, 1, 2], [4, 0]), ([0, 0, 2], [4])],
)
def test_greedy_prefix(drafts, emitted):
    verified = TokenVerifier(LogitsProcessorList(), do_sample=False).verify(PROMPT, torch.tensor(drafts), LOGITS)
    assert verified.tokens.tolist() == emitted
    assert torch.equal(verified.logits, LOGITS[: len(emitted)].float()) and verified.logits.dtype == torch.float32
    assert torch.equal(verified.scores, verified.logits)


@pytest.mark.parametrize("do_sample", [False, True])
def test_without_drafts_the_targets_token_is_emitted(do_sample):
    verifier = TokenVerifier(LogitsProcessorList(), do_sample)
    verified = verifier.verify(PROMPT, torch.empty(0, dtype=torch.long), LOGITS[:1] * 100)
    assert verified.tokens.tolist() == [4]


@pytest.mark.parametrize(("drafts", "num_seen"), [([4, 0, 2], 4), ([4, 0, 1], 3), ([4, 1, 2], 2), ([0, 0, 2], 1)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_sees_accepted_prefixes_only(drafts, num_seen, do_sample):
    """In the order of plain decoding, one call a row; and the raw logits stay raw."""
    recorder = Recorder()
    verifier = TokenVerifier(LogitsProcessorList([recorder]), do_sample)
    logits = LOGITS * 100
    verified = verifier.verify(PROMPT, torch.tensor(drafts), logits)
    assert recorder.seen == [[1, 2, 3, *drafts[:row]] for row in range(num_seen)]
    assert torch.equal(verified.logits, logits[:num_seen].float())
    assert torch.equal(verified.scores[:, 3], verified.logits[:, 3] + 1)


def test_rowwise_and_row_by_row_agree():
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(2)]
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    drafts = torch.cat([torch.tensor([int(logits[row].argmax())]) for row in range(3)])
    at_once = TokenVerifier(LogitsProcessorList(warpers), False)
    row_by_row = TokenVerifier(LogitsProcessorList([*warpers, Recorder()]), False)
    row_by_row._processor = LogitsProcessorList(warpers)
    one, other = (verifier.verify(PROMPT, drafts, logits) for verifier in (at_once, row_by_row))
    assert at_once._is_rowwise and not row_by_row._is_rowwise
    assert torch.equal(one.scores, other.scores) and torch.equal(one.tokens, other.tokens)
    assert one.scores.isinf().sum() == 4 * 3
