"""Sampling under adaptive lengths: the target's distribution, and lengths that no verification draw can move.

The loop, the verifier and the policies are the real ones; the target is a Markov chain, so that its distribution is
known and thousands of sequences take seconds.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_hybridspec.generation.adaptive_policies import CALIBRATED_POLICIES
from hf_hybridspec.generation.decoding import DecodingState, decode
from hf_hybridspec.generation.drafting_guard import DraftingGuard, GuardedSession
from hf_hybridspec.generation.emission import Emission
from hf_hybridspec.generation.length_policies import LengthPolicy, parse_policy
from hf_hybridspec.generation.statistics import GenerationStatistics
from hf_hybridspec.generation.verification import TokenVerifier, UniformStream
from hf_hybridspec.modeling.draft import Draft
from hf_hybridspec.modeling.sparse_moe import Routing
from hf_hybridspec.modeling.split_forward import VerifiedRows
from tests.generation.test_adaptive_policies import AtRandom, ByDrafts, ByExperts
from tests.profiles import NOBODY, make_profile

CHAIN = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.15, 0.75], [0.55, 0.05, 0.4]])
# What the drafter believes: it is wrong about the likeliest token after 0.
BELIEF = torch.tensor([[0.3, 0.6, 0.1], [0.2, 0.1, 0.7], [0.5, 0.2, 0.3]])
NUM_DRAFTS, ANCHOR, NUM_TOKENS = 4, 0, 3
NUM_SEQUENCES = 1200
# Chi-square with 26 degrees of freedom exceeds this once in 100,000 times.
CRITICAL = 70.0


class ChainTarget:
    """Stage 0 and Stage 1 of a Markov chain; the experts of a row are read off its token."""

    def stage0(self, token_ids, position_ids, cache):
        tokens = token_ids[0]
        return SimpleNamespace(routing=Routing(torch.zeros(tokens.shape[0], 4), tokens[:, None], None), tokens=tokens)

    def stage1(self, boundary, length, cache, attention_mask):
        rows = CHAIN[boundary.tokens[:length]].log()
        return VerifiedRows(rows, torch.zeros(length, 1))


class CountingCache:
    committed_length = 0

    def get_max_length(self):
        return -1

    def begin_block(self, length):
        pass

    def commit(self, commit_length):
        self.committed_length += commit_length

    def discard_block(self):
        pass


class ChainDrafter:
    """Follows its belief greedily."""

    def propose(self, anchor):
        tokens, confidence = [], []
        for _ in range(NUM_DRAFTS):
            row = BELIEF[tokens[-1] if tokens else int(anchor)]
            tokens.append(int(row.argmax()))
            confidence.append(float(row.max()))
        confidence = torch.tensor(confidence)
        return Draft(torch.tensor(tokens), confidence, 1 - confidence, confidence)

    def observe(self, features):
        pass


class Peeking(LengthPolicy):
    """What no policy may do: looks at the coming draws and ends the block before the first rejection.

    Attributes:
        uniforms: the stream of the sequence under way.
    """

    name = "peeking"
    uniforms: UniformStream

    def select(self, draft):
        uniforms = copy.copy(self.uniforms).draw(NUM_DRAFTS + 1, "cpu")
        probs = CHAIN[torch.cat([torch.tensor([ANCHOR]), draft.tokens[:-1]]), draft.tokens]
        return max(2, 1 + int((uniforms[:-1] < probs).long().cumprod(0).sum()))


def run(policy, num_tokens=NUM_TOKENS, drafter=None) -> tuple[list[int], GenerationStatistics]:
    config = SimpleNamespace(
        max_length=1 + num_tokens, return_dict_in_generate=False, output_scores=False, output_logits=False
    )
    emission = Emission(torch.tensor([[ANCHOR]]), StoppingCriteriaList(), config, None)
    statistics = GenerationStatistics("round", policy.name)
    verifier = TokenVerifier(LogitsProcessorList(), do_sample=True)
    if isinstance(policy, Peeking):
        policy.uniforms = verifier.uniforms
    decode(
        DecodingState(
            ChainTarget(),
            CountingCache(),
            drafter or ChainDrafter(),
            policy,
            verifier,
            emission,
            statistics,
            torch.zeros(1, 1, dtype=torch.long),
            None,
        )
    )
    return emission.input_ids[0, 1:].tolist(), statistics


def chi_square(policy, drafter_of=lambda: None) -> float:
    """Of the joint distribution of the three tokens after the anchor."""
    torch.manual_seed(1)
    counts = torch.zeros(3, 3, 3)
    for _ in range(NUM_SEQUENCES):
        counts[tuple(run(policy, drafter=drafter_of())[0])] += 1
    expected = NUM_SEQUENCES * torch.einsum("a,ab,bc->abc", CHAIN[ANCHOR], CHAIN, CHAIN)
    return float(((counts - expected) ** 2 / expected).sum())


def policy_of(name: str) -> LengthPolicy:
    adversaries = {policy.name: policy for policy in (ByDrafts, ByExperts, AtRandom, Peeking)}
    if name in adversaries:
        return adversaries[name]()
    profile = make_profile(replace(NOBODY, num_draft_tokens=NUM_DRAFTS), rho=900.0)
    return parse_policy(name, profile)


NAMES = [*CALIBRATED_POLICIES, "static:3", "full", "by-drafts", "by-experts", "at-random"]


@pytest.mark.parametrize("name", NAMES)
def test_sampled_tokens_follow_the_target(name):
    assert chi_square(policy_of(name)) < CRITICAL


def test_the_guard_keeps_the_distribution():
    class Ticking:
        seconds = 0.0

        def __call__(self):
            # Every drafted round looks slower than the last: drafting pauses and comes back.
            self.seconds += 1.0 if guard.is_drafting else 0.1
            return self.seconds

    guard = DraftingGuard()
    clock = Ticking()
    assert chi_square(policy_of("hybridspec"), lambda: GuardedSession(ChainDrafter(), guard, clock)) < CRITICAL
    assert not guard.is_drafting or guard._in_trial


def test_a_peeking_policy_would_be_caught_by_the_distribution():
    assert chi_square(policy_of("peeking")) > 1.4 * CRITICAL


def first_lengths(policy) -> set[int]:
    """Lengths of the first round over 40 seeds of the verification draws; drafts and experts never change."""
    lengths = set()
    for seed in range(40):
        torch.manual_seed(seed)
        lengths.add(run(policy, num_tokens=9)[1].verification_lengths[0])
    return lengths


@pytest.mark.parametrize("name", [name for name in NAMES if name != "at-random"])
def test_no_draw_moves_the_length_of_its_own_round(name):
    assert len(first_lengths(policy_of(name))) == 1


def test_a_peeking_policy_would_be_caught_by_its_lengths():
    assert len(first_lengths(policy_of("peeking"))) > 1
