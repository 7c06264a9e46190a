"""Proposition 2: sampled tokens are distributed as the target's, whatever is drafted and how long a block is."""

import itertools

import pytest
import torch
from transformers import LogitsProcessorList, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, set_seed
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_hybridspec import LengthPolicy, attach
from hf_hybridspec.generation import verification
from hf_hybridspec.generation.verification import TokenVerifier, UniformStream
from hf_hybridspec.modeling.draft import Draft
from tests.scenarios import LOOPS, assisted, scripted
from tests.support import ScriptedDrafter, drafter_config, random_target

VOCABULARY = 4
NUM_NEW = 3
NUM_SAMPLES = 200
PROMPT = torch.tensor([[1, 3, 2]])
# Fewer than one in 10^4 statistics of the right distribution lie this many standard deviations above their mean.
DEVIATIONS = 5
OPTIONS = {
    "temperature": {"temperature": 1.4, "top_k": 0},
    "top-k and top-p": {"temperature": 1.2, "top_k": 4, "top_p": 0.9},
    "penalty": {"temperature": 1.3, "top_k": 0, "repetition_penalty": 1.4},
}
WARPERS = {
    "temperature": [TemperatureLogitsWarper(1.4)],
    "top-k and top-p": [TemperatureLogitsWarper(1.2), TopKLogitsWarper(4), TopPLogitsWarper(0.9)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(1.3)],
}


@pytest.fixture(scope="module")
def target():
    """Two layers and four tokens."""
    values = random_target("qwen3_5_moe").config.to_dict()
    values.update(
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        initializer_range=0.15,
        max_position_embeddings=64,
    )
    torch.manual_seed(2)
    return attach(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**values)).eval())


@torch.no_grad()
def distribution(target, warpers) -> torch.Tensor:
    """`[V] * NUM_NEW`: the exact probability of every continuation."""
    prefixes = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=NUM_NEW - 1)))
    sequences = torch.cat([PROMPT.expand(len(prefixes), -1), prefixes], dim=1)
    logits = target(input_ids=sequences).logits.float()
    joint = torch.ones(len(prefixes), 1)
    steps = []
    for step in range(NUM_NEW):
        seen = sequences[:, : PROMPT.shape[1] + step]
        scores = LogitsProcessorList(warpers)(seen, logits[:, PROMPT.shape[1] - 1 + step].clone())
        steps.append(scores.softmax(-1))
    for step, probs in enumerate(steps[:-1]):
        joint = joint * probs.gather(1, prefixes[:, step : step + 1])
    return (joint * steps[-1]).view([VOCABULARY] * NUM_NEW)


class LikelyDrafter(ScriptedDrafter):
    """Drafts what the target finds most likely after the anchor alone, so that it is right most of the time."""

    drafts_after: dict[int, torch.Tensor]

    def propose(self, context, anchor, position, recurrent_states=None) -> Draft:
        tokens = self.drafts_after[int(anchor)]
        return Draft(tokens, torch.full((len(tokens),), 0.5), torch.ones(len(tokens)))


def likely_drafter(target) -> LikelyDrafter:
    config = drafter_config(
        4, vocab_size=VOCABULARY, mask_token_id=VOCABULARY - 1, target_layer_ids=[0], num_target_layers=2
    )
    drafter = LikelyDrafter(config).eval()
    drafter.drafts_after = {
        anchor: target.generate(
            torch.cat([PROMPT, torch.tensor([[anchor]])], dim=1), max_new_tokens=3, do_sample=False
        )[0, -3:]
        for anchor in range(VOCABULARY)
    }
    return drafter


class LengthsByDraft(LengthPolicy):
    """Lengths that depend on what is drafted and on the experts: allowed, since no draw has been made by then."""

    name = "by draft"
    lookahead = 1

    def select(self, draft):
        return 2 + int(draft.tokens[0]) % 2

    def correct(self, nominal_length, new_experts):
        return nominal_length + new_experts % 2


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; continuations expected less than 5 times share one cell."""
    expected = probs * counts.sum()
    rare = expected < 5
    pooled = [(counts[rare].sum(), expected[rare].sum())] if expected[rare].sum() > 0 else []
    cells = [*zip(counts[~rare], expected[~rare], strict=True), *pooled]
    return sum(float((count - mean) ** 2 / mean) for count, mean in cells), len(cells) - 1


def statistic_of(target, loop, name, policy="full") -> tuple[float, float]:
    """Chi-square statistic of NUM_SAMPLES calls, and the limit that the right distribution stays under."""
    set_seed(0)
    probs, counts, emitted = distribution(target, WARPERS[name]), torch.zeros([VOCABULARY] * NUM_NEW), []
    assert abs(float(probs.sum()) - 1) < 1e-5
    drafter = likely_drafter(target)
    options = {"max_new_tokens": NUM_NEW, "do_sample": True, "length_policy": policy, **OPTIONS[name]}
    for _ in range(NUM_SAMPLES):
        output = assisted(target, PROMPT, drafter, loop, **options)
        counts[tuple(output[0, -NUM_NEW:])] += 1
        emitted += target.generation_statistics.emitted
    # Drafts are accepted and rejected in earnest.
    assert min(emitted.count(1), emitted.count(2)) > NUM_SAMPLES // 5
    assert counts[probs == 0].sum() == 0
    statistic, freedom = chi_square(counts.flatten(), probs.flatten())
    assert freedom >= 8
    return statistic, freedom + DEVIATIONS * (2 * freedom) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "name"),
    [("round", "temperature"), ("host", "temperature"), ("round", "penalty"), ("host", "top-k and top-p")],
)
def test_continuations_are_distributed_as_the_targets(target, loop, name):
    statistic, limit = statistic_of(target, loop, name, LengthsByDraft() if name == "temperature" else "full")
    assert statistic < limit


@pytest.mark.slow
def test_a_wrong_acceptance_rule_is_noticed(target, monkeypatch):
    """Accepting a draft with twice its probability, say."""
    original = verification.point_mass_acceptance

    def eager(draft_tokens, target_probs, uniforms):
        return original(draft_tokens, target_probs, torch.cat([uniforms[:-1] / 2, uniforms[-1:]]))

    monkeypatch.setattr(verification, "point_mass_acceptance", eager)
    statistic, limit = statistic_of(target, "round", "temperature")
    assert statistic > limit


@pytest.mark.parametrize("is_rowwise", [True, False])
def test_one_verification_is_distributed_as_the_targets(is_rowwise):
    """The verifier alone, with many more samples: both ways of processing, rejected rows left raw."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, VOCABULARY, generator=generator)
    warpers = WARPERS["top-k and top-p"] if is_rowwise else WARPERS["penalty"]
    verifier = TokenVerifier(LogitsProcessorList(warpers), do_sample=True)
    drafts = logits.argmax(-1)[:2]
    probs = []
    for row in range(3):
        prefix = torch.cat([PROMPT, drafts[None, :row]], dim=1)
        probs.append(LogitsProcessorList(warpers)(prefix, logits[row : row + 1].clone())[0].softmax(-1))
    expected = torch.zeros(VOCABULARY + 1, VOCABULARY + 1, VOCABULARY + 1)
    counts = torch.zeros_like(expected)
    for first, second, third in itertools.product(range(VOCABULARY), repeat=3):
        # After a rejection nothing is emitted: VOCABULARY stands for it.
        if first != drafts[0]:
            expected[first, VOCABULARY, VOCABULARY] = probs[0][first]
        elif second != drafts[1]:
            expected[first, second, VOCABULARY] = probs[0][first] * probs[1][second]
        else:
            expected[first, second, third] = probs[0][first] * probs[1][second] * probs[2][third]
    set_seed(1)
    for _ in range(2000):
        tokens = verifier.verify(PROMPT, drafts, logits).tokens.tolist()
        counts[(*tokens, VOCABULARY, VOCABULARY)[:3]] += 1
    assert counts[expected == 0].sum() == 0
    statistic, freedom = chi_square(counts.flatten(), expected.flatten())
    assert freedom >= 5 and statistic < freedom + DEVIATIONS * (2 * freedom) ** 0.5


def test_uniforms_are_drawn_after_the_length_is_fixed(target_pairs, monkeypatch):
    """Nothing is drawn between two verifications, neither from the global generator nor from the sequence's stream,
    and one verification draws as many uniforms as it has rows: a policy that would read a draw has none to read."""
    pair = target_pairs["qwen3_5_moe"]
    states, rows, drawn = [], [], []
    verify, draw = TokenVerifier.verify, UniformStream.draw

    def watched_verify(self, input_ids, draft_tokens, logits):
        before = torch.get_rng_state()
        result = verify(self, input_ids, draft_tokens, logits)
        states.append((before, torch.get_rng_state()))
        rows.append(logits.shape[0])
        return result

    def watched_draw(self, count, device):
        drawn.append((self.round_index, count))
        return draw(self, count, device)

    monkeypatch.setattr(TokenVerifier, "verify", watched_verify)
    monkeypatch.setattr(UniformStream, "draw", watched_draw)
    set_seed(3)
    options = {"max_new_tokens": 40, "do_sample": True, "length_policy": LengthsByDraft()}
    assisted(pair.attached, pair.prompt, scripted(pair.reference), "round", **options)
    assert len(states) > 10 and {2, 3} <= set(rows)
    assert drawn == list(zip(range(-1, len(rows) - 1), rows, strict=True))
    generators = [state for pair_of_states in states for state in pair_of_states]
    assert all(torch.equal(state, generators[0]) for state in generators)


def test_a_stream_is_set_by_the_seed_and_never_repeats():
    streams = []
    for seed in (5, 5, 6):
        set_seed(seed)
        stream = UniformStream()
        streams.append(torch.stack([stream.draw(16, "cpu") for _ in range(50)]))
    assert torch.equal(streams[0], streams[1]) and not torch.equal(streams[0], streams[2])
    assert streams[0].unique().numel() == streams[0].numel()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_seed_makes_sampling_reproducible(pair, loop):
    outputs = []
    for seed in (7, 7, 8):
        drafter = scripted(pair.reference)
        set_seed(seed)
        outputs.append(assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=30, do_sample=True))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
