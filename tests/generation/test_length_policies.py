"""The policies that need no profile, and their names."""

import pytest
import torch

from hf_hybridspec.generation.length_policies import Full, Static, check_policy, default_policy, parse_policy
from hf_hybridspec.modeling.draft import Draft


def draft(num_tokens: int) -> Draft:
    return Draft(torch.arange(num_tokens), torch.rand(num_tokens), torch.rand(num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 6, 15])
def test_lengths_count_the_anchor(num_tokens):
    assert Full().select(draft(num_tokens)) == num_tokens + 1
    for length in range(2, 17):
        assert Static(length).select(draft(num_tokens)) == min(length, num_tokens + 1)


def test_neither_looks_ahead_or_corrects():
    for policy in (Full(), Static(5)):
        assert policy.lookahead == 0
        assert [policy.correct(5, new) for new in (0, 1, 9)] == [5, 5, 5]


@pytest.mark.parametrize("name", ["full", "static:2", "static:16"])
def test_names_are_parsed_back(name):
    assert parse_policy(name).name == name


@pytest.mark.parametrize("name", ["", "static", "static:", "static:x", "static:-3", "static:2.5", "full:3", "Full"])
def test_other_names_are_refused_with_the_allowed_ones(name):
    with pytest.raises(ValueError, match=r"Unknown length policy .*'full'.*'static:W'"):
        parse_policy(name)


@pytest.mark.parametrize("length", [-1, 0, 1])
def test_a_length_without_a_draft_is_refused(length):
    with pytest.raises(ValueError, match=f"at least 2 .*got {length}"):
        Static(length)


def test_a_length_beyond_the_block_is_refused():
    check_policy(Static(7), 6)
    check_policy(Full(), 6)
    with pytest.raises(ValueError, match=r"verification_length must be in \[2, 7\].*got 8"):
        check_policy(Static(8), 6)


def test_the_stated_default():
    """Full blocks on a dense target; static 6 on an MoE target, or its drafter's block if that is shorter."""
    assert default_policy(False, 15).name == "full"
    assert default_policy(True, 15).name == "static:6"
    assert default_policy(True, 3).name == "static:4"
