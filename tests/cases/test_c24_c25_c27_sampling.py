"""C24, C25, C27: sampling gives the target's distribution, drafts are accepted as often as the target would draw
them, and a grammar follows every accepted token."""

import json

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import hf_hybridspec
from hf_hybridspec.generation.verification import TokenVerifier
from tests.conftest import character_tokenizer
from tests.scenarios import LOOPS, assisted, plain, scripted
from tests.support import random_target

DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5])
# Chi-square with 3 degrees of freedom exceeds this once in 100,000 runs of a fresh seed.
CHI_SQUARE_LIMIT = 25.9


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_c24_the_first_token_has_the_targets_distribution():
    torch.manual_seed(0)
    verifier = TokenVerifier(LogitsProcessorList(), do_sample=True)
    input_ids, greedy = torch.zeros(1, 1, dtype=torch.long), torch.tensor([0, 0])
    logits = LOGITS.repeat(3, 1)
    counts = torch.zeros(3, 4)
    for _ in range(DRAWS):
        for row, token in enumerate(verifier.verify(input_ids, greedy, logits).tokens.tolist()):
            counts[row, token] += 1
    probabilities = LOGITS.softmax(-1)
    assert counts[0].sum() == DRAWS
    # Also after one and after two accepted drafts, where rows count only if they are reached.
    for row in range(3):
        assert chi_square(counts[row], probabilities) < CHI_SQUARE_LIMIT
    assert abs(counts[1].sum() / DRAWS - probabilities[0]) < 0.02


def test_c24_fails_if_the_rejected_draft_may_be_drawn_again():
    """The fault: a replacement from the whole distribution. The test above must see it."""
    torch.manual_seed(0)
    probabilities = LOGITS.softmax(-1)
    is_accepted = torch.rand(DRAWS) < probabilities[0]
    drawn = torch.where(is_accepted, 0, torch.multinomial(probabilities, DRAWS, replacement=True))
    assert chi_square(torch.bincount(drawn, minlength=4).float(), probabilities) > 100 * CHI_SQUARE_LIMIT


@pytest.fixture(scope="module")
def peaked():
    """Stock and attached target whose greedy token has most of the probability, and 40 of its greedy tokens."""
    models = [random_target(), hf_hybridspec.attach(random_target())]
    for model in models:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(6)
    prompt = torch.arange(1, 10)[None]
    return *models, prompt, plain(models[0], prompt, max_new_tokens=40)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
@torch.no_grad()
def test_c25_acceptance_is_the_targets_own_probability_of_the_drafts(peaked, temperature):
    stock, _, _, sequence = peaked
    logits = stock(sequence).logits[0, 20:36]
    drafts = sequence[0, 21:36]
    own = (logits / temperature).softmax(-1)[:-1].gather(-1, drafts[:, None])[:, 0]
    verifier = TokenVerifier(LogitsProcessorList([TemperatureLogitsWarper(temperature)]), do_sample=True)
    torch.manual_seed(1)
    accepted = [len(verifier.verify(sequence[:, :21], drafts, logits).tokens) - 1 for _ in range(2000)]
    expected = float(own.cumprod(0).sum())
    assert expected > 0.5
    assert abs(sum(accepted) / 2000 - expected) < 0.1 * expected + 0.05


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("loop", LOOPS)
def test_c25_drafts_are_accepted_at_every_temperature(peaked, loop, temperature):
    _, attached, prompt, sequence = peaked
    drafter = scripted(sequence, [15])
    torch.manual_seed(3)
    emitted = rounds = 0
    for _ in range(6):
        assisted(attached, prompt, drafter, loop, max_new_tokens=6, do_sample=True, temperature=temperature, top_k=0)
        emitted += sum(attached.generation_statistics.emitted)
        rounds += attached.generation_statistics.rounds
    assert emitted / rounds > 1.2


class JsonGrammar:
    """`{"a":N,"b":[N,N]}` with numbers of one to three digits: which characters may follow an answer so far."""

    def __init__(self, tokenizer, prompt_length: int, eos: int):
        self._tokenizer, self._prompt_length, self._eos = tokenizer, prompt_length, eos
        self.seen = []

    def __call__(self, batch_id: int, input_ids: torch.Tensor) -> list[int]:
        text = self._tokenizer.decode(input_ids[self._prompt_length :])
        self.seen.append(text)
        return [self._tokenizer.convert_tokens_to_ids(c) for c in self._next(text)] or [self._eos]

    def _next(self, text: str) -> str:
        for literal, closing in (('{"a":', ","), ('"b":[', ","), ("", "]"), ("}", "")):
            if len(text) < len(literal):
                return literal[len(text)]
            text = text[len(literal) :]
            if not closing:
                return ""
            digits = text.partition(closing)[0]
            if closing not in text:
                return self._number(digits, closing)
            text = text[len(digits) + 1 :]
        return ""

    @staticmethod
    def _number(digits: str, closing: str) -> str:
        more = "123456789" if not digits else "0123456789" if len(digits) < 3 else ""
        return more + (closing if digits else "")


@pytest.mark.parametrize("num_right", [[15], [2, 0, 5], [1, 1, 0]])
@pytest.mark.parametrize("loop", LOOPS)
def test_c27_a_json_grammar_follows_accepted_tokens(pair, loop, num_right):
    tokenizer, eos = character_tokenizer(), 126
    options = {"max_new_tokens": 40, "eos_token_id": eos}
    grammar = JsonGrammar(tokenizer, 9, eos)
    expected = plain(pair.stock, pair.prompt, prefix_allowed_tokens_fn=grammar, **options)
    text = tokenizer.decode(expected[0, 9:-1])
    assert set(json.loads(text)) == {"a", "b"}
    drafted = JsonGrammar(tokenizer, 9, eos)
    drafter = scripted(expected, num_right)
    output = assisted(pair.attached, pair.prompt, drafter, loop, prefix_allowed_tokens_fn=drafted, **options)
    assert torch.equal(output, expected)
    if loop == "round":
        # The grammar is shown each prefix once and no rejected token.
        assert drafted.seen[: len(grammar.seen)] == grammar.seen
