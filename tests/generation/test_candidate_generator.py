"""HybridSpecCandidateGenerator: what it proposes to the host's loop, and what it tells drafter and statistics."""

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_hybridspec import HybridCache, HybridSpecCandidateGenerator
from hf_hybridspec.generation.draft_session import DraftSession
from hf_hybridspec.generation.length_policies import Full, Static
from hf_hybridspec.generation.statistics import GenerationStatistics
from tests.scenarios import scripted
from tests.support import random_prompt


class StopsAt(StoppingCriteria):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class Setting:
    """A generator after a prefill of `num_rows` rows, beside a target that never runs."""

    def __init__(self, pair, policy=None, criteria=(), max_length=100, num_rows=9, cache_length=None):
        self.sequence = random_prompt(60, seed=3)
        self.drafter = scripted(self.sequence, [15])
        embedding, head = pair.attached.get_input_embeddings(), pair.attached.get_output_embeddings()
        self.drafter.bind(embedding, head, pair.attached.config)
        self.cache = HybridCache(pair.attached.config, cache_length)
        self.statistics = GenerationStatistics("host", "full")
        session = DraftSession(self.drafter, self.cache, num_padding=0)
        self.generator = HybridSpecCandidateGenerator(
            session, self.cache, policy or Full(), StoppingCriteriaList(criteria), max_length, self.statistics
        )
        pair.attached(self.sequence[:, :num_rows], cache=self.cache)
        self.generator.on_features(torch.randn(num_rows, 64))
        # The anchor is the token after the prefilled rows.
        self.input_ids = self.sequence[:, : num_rows + 1]


@pytest.fixture
def moe(target_pairs):
    return target_pairs["qwen3_5_moe"]


def test_nothing_is_proposed_with_the_prefill(moe):
    setting = Setting(moe)
    candidates, logits = setting.generator.get_candidates(setting.input_ids, is_first_iteration=True)
    assert candidates is setting.input_ids and logits is None
    assert not setting.drafter.proposals


@pytest.mark.parametrize("policy, num_drafts", [(Full(), 15), (Static(2), 1), (Static(6), 5)])
def test_as_many_drafts_as_the_policy_verifies_and_no_draft_logits(moe, policy, num_drafts):
    setting = Setting(moe, policy)
    candidates, logits = setting.generator.get_candidates(setting.input_ids)
    assert logits is None
    assert torch.equal(candidates, setting.sequence[:, : 10 + num_drafts])


def test_no_draft_beyond_the_length_limit(moe):
    setting = Setting(moe, max_length=14)
    candidates, _ = setting.generator.get_candidates(setting.input_ids)
    # Four tokens are left: three drafts and the target's own.
    assert candidates.shape[1] == 13


def test_no_draft_beyond_a_static_cache(moe):
    setting = Setting(moe, cache_length=12)
    candidates, _ = setting.generator.get_candidates(setting.input_ids)
    # Rows 9, 10 and 11 are free.
    assert candidates.shape[1] == 12


def test_drafts_end_before_the_token_at_which_a_criterion_stops(moe):
    setting = Setting(moe, criteria=[MaxLengthCriteria(100), StopsAt(int(random_prompt(60, seed=3)[0, 14]))])
    candidates, _ = setting.generator.get_candidates(setting.input_ids)
    assert torch.equal(candidates, setting.sequence[:, :14])


def test_committed_rows_reach_the_drafter_only_after_the_commit(moe):
    setting = Setting(moe)
    setting.generator.get_candidates(setting.input_ids)
    setting.cache.begin_block(16)
    context = setting.cache.drafter_context.context
    setting.generator.on_features(torch.randn(16, 64))
    assert context.length == 9
    setting.generator.update_candidate_strategy(setting.sequence[:, :14], None, num_matches=3)
    assert context.length == 13
    assert torch.equal(context.layers[0].positions, torch.arange(13))
    assert (setting.statistics.emitted, setting.statistics.verification_lengths) == ([4], [16])


def test_the_hosts_model_arguments_stay_as_they_are(moe):
    setting = Setting(moe)
    assert setting.generator.requires_model_outputs
    assert setting.generator.model_kwargs_overrides == {}
