"""Caches that the cache tests compare with."""

import pytest

from tests.support import random_prompt

from .cache_helpers import ROWS, decoded_one_by_one, prefilled


@pytest.fixture(scope="session")
def decoded(target_pairs):
    """For (class, static, prompt length): the prefilled cache, and what it becomes after 0.. single tokens of ROWS."""
    known = {}

    def lookup(pair, is_static, prompt_length=9):
        key = (pair.kind, is_static, prompt_length)
        if key not in known:
            num_tokens = 40 if prompt_length == 9 else 7
            cache = prefilled(pair.attached, random_prompt(prompt_length, seed=5), is_static)
            known[key] = cache, decoded_one_by_one(pair.attached, cache, ROWS[:, :num_tokens])
        return known[key]

    return lookup
