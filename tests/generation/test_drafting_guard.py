"""The drafting guard: pauses what is slower, comes back when it is faster again, never changes the text."""

import pytest
import torch

import hf_hybridspec
from hf_hybridspec.generation import drafting_guard
from hf_hybridspec.generation.drafting_guard import CLEARLY_FASTER, DraftingGuard, GuardedSession, guarded
from hf_hybridspec.generation.length_policies import Full, HybridSpec, default_policy
from tests.profiles import noisy_drafter, profile_of
from tests.support import random_prompt, random_target


def play(guard, num_rounds, seconds_of, tokens_of):
    """Runs rounds against scripted throughputs; returns which drafted."""
    drafted = []
    for _ in range(num_rounds):
        drafted.append(guard.is_drafting)
        guard.record(tokens_of[guard.is_drafting], seconds_of[guard.is_drafting])
    return drafted


def test_slow_drafting_pauses_and_costs_little():
    drafted = play(DraftingGuard(), 600, {True: 2.0, False: 1.0}, {True: 1.1, False: 1})
    assert sum(drafted) < 30 and drafted[0]
    seconds = sum(2.0 if drafts else 1.0 for drafts in drafted)
    tokens = sum(1.1 if drafts else 1 for drafts in drafted)
    # C33: never below 0.95 of plain decoding.
    assert tokens / seconds > 0.95


def test_fast_drafting_is_hardly_ever_interrupted():
    drafted = play(DraftingGuard(), 600, {True: 1.5, False: 1.0}, {True: 3.0, False: 1})
    assert CLEARLY_FASTER < 3.0 / 1.5 and 600 - sum(drafted) <= 9


def test_drafting_comes_back_when_the_text_becomes_easy():
    guard = DraftingGuard()
    play(guard, 40, {True: 2.0, False: 1.9}, {True: 1.0, False: 1})
    assert not guard.is_drafting or guard._in_trial
    play(guard, 300, {True: 2.0, False: 1.9}, {True: 4.0, False: 1})
    assert guard.is_drafting


@pytest.mark.parametrize("path", ["round", "host"])
def test_a_paused_drafter_leaves_the_text_alone(path, monkeypatch):
    target = hf_hybridspec.attach(random_target())
    sequence = target.generate(random_prompt(9, seed=1), max_new_tokens=80, do_sample=False)
    drafter = noisy_drafter(sequence[0])
    policy = HybridSpec(profile_of(target, drafter), is_guarded=True)
    monkeypatch.setattr(drafting_guard, "FIRST_INTERVAL", 4)
    monkeypatch.setattr(DraftingGuard, "record", _slow_when_drafting(DraftingGuard.record))
    output = target.generate(
        sequence[:, :9],
        max_new_tokens=80,
        do_sample=False,
        assistant_model=drafter,
        length_policy=policy,
        decoding_path=path,
    )
    assert torch.equal(output, sequence)
    lengths = target.generation_statistics.verification_lengths
    assert 1 in lengths and max(lengths) > 2


def _slow_when_drafting(record):
    """Every drafted round seems to take ten times as long as a plain one."""
    return lambda guard, num_tokens, seconds: record(guard, num_tokens, 10.0 if guard.is_drafting else 1.0)


def test_only_lengths_that_nobody_asked_for_are_guarded_on_a_gpu():
    session, cuda, cpu = object(), torch.device("cuda"), torch.device("cpu")
    assert guarded(session, Full(), cuda) is session
    default = default_policy(True, 15)
    assert guarded(session, default, cpu) is session
    assert isinstance(guarded(session, default, cuda), GuardedSession)
