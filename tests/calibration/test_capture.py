"""Capture: what is recorded, what is left out, and going on after an interruption."""

import pytest
import torch

import hf_hybridspec
from hf_hybridspec.calibration.calibrate import CalibrationPlan, calibrate
from hf_hybridspec.calibration.capture import Prompt, RoundRecorder, capture, capture_prompt, new_experts
from hf_hybridspec.calibration.profile import CalibrationProfile
from hf_hybridspec.calibration.rounds import CaptureSettings, PromptRounds, RoundArrays, RoundFile, read_rounds
from hf_hybridspec.generation.length_policies import parse_policy
from hf_hybridspec.generation.pair_identity import pair_identity
from tests.profiles import noisy_drafter
from tests.support import random_prompt, random_target


@pytest.fixture(scope="module")
def pair():
    target = hf_hybridspec.attach(random_target())
    sequence = target.generate(random_prompt(9, seed=1), max_new_tokens=76, do_sample=False)
    return target, noisy_drafter(sequence[0]), sequence


def prompt_of(sequence, key="p", length=9) -> Prompt:
    return Prompt(key, "kind", sequence[:, :length])


def test_new_experts_are_counted_row_by_row():
    top_k_index = torch.tensor([[0, 1], [1, 2], [0, 2], [3, 4]])
    assert new_experts(top_k_index).tolist() == [2, 1, 0, 2]


def test_rounds_hold_signals_acceptance_and_experts(pair):
    target, drafter, sequence = pair
    recorder = RoundRecorder(target)
    captured = capture_prompt(target, drafter, prompt_of(sequence), 60, recorder)
    statistics = target.generation_statistics
    assert statistics.rounds == len(captured.rounds) + captured.num_excluded and len(captured.rounds) > 3
    start = 9
    for round_, emitted, draft in zip(captured.rounds, statistics.emitted, recorder.drafts, strict=False):
        # The anchor is the newest token: drafts follow it, and the accepted ones are the target's own.
        accepted = round_.num_accepted
        assert accepted == emitted - 1
        assert torch.equal(draft.tokens[:accepted], sequence[0, start + 1 : start + 1 + accepted])
        assert accepted == 15 or draft.tokens[accepted] != sequence[0, start + 1 + accepted]
        assert round_.confidence == tuple(draft.confidence.tolist()) and len(round_.entropy) == 15
        start += emitted
    # Experts of the last recorded round, from a plain forward over the same tokens.
    index = len(captured.rounds) - 1
    before = 10 + sum(statistics.emitted[:index])
    rows = torch.cat([sequence[0, :before], recorder.drafts[index].tokens])[None]
    assignments = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, output: assignments.append(output[2]))
        for layer in target.model.layers
    ]
    target(rows)
    for hook in hooks:
        hook.remove()
    counts = torch.stack([new_experts(layer[before - 1 :])[1:] for layer in assignments])
    assert captured.rounds[index].new_layer0 == tuple(counts[0].tolist())
    assert captured.rounds[index].new_pairs == tuple(counts.sum(dim=0).tolist())


def test_rounds_that_end_or_limit_the_answer_are_left_out(pair):
    target, drafter, sequence = pair
    captured = capture_prompt(target, drafter, prompt_of(sequence), 40, RoundRecorder(target))
    lengths = target.generation_statistics.verification_lengths
    assert captured.num_excluded >= sum(length < 16 for length in lengths) + (lengths[-1] == 16)
    ended = capture_prompt(target, drafter, prompt_of(sequence), 2, RoundRecorder(target))
    assert ended.rounds == () and ended.num_excluded == 1
    with pytest.raises(ValueError, match="None of the 1 prompts gave a whole round"):
        RoundArrays.of([ended])


def settings_of(pair, max_new_tokens=40) -> CaptureSettings:
    return CaptureSettings(pair_identity(pair[0], pair[1]), max_new_tokens)


def test_an_interrupted_capture_goes_on_after_its_last_whole_line(pair, tmp_path, monkeypatch):
    target, drafter, sequence = pair
    prompts = [prompt_of(sequence, f"p{length}", length) for length in (9, 11, 14)]
    path = tmp_path / "rounds.jsonl"
    whole = capture(target, drafter, prompts, 40, RoundFile(path, settings_of(pair)))
    content = path.read_bytes()
    # The machine stops in the middle of the last line.
    path.write_bytes(content[:-50])
    resumed = RoundFile(path, settings_of(pair))
    assert list(resumed.finished) == ["p9", "p11"]
    decoded = []
    original = capture_prompt

    def counted(*args):
        decoded.append(args[2].key)
        return original(*args)

    monkeypatch.setattr("hf_hybridspec.calibration.capture.capture_prompt", counted)
    assert capture(target, drafter, prompts, 40, resumed) == whole
    assert decoded == ["p14"] and path.read_bytes() == content
    assert read_rounds(path)[1] == whole


def test_rounds_of_another_pair_or_file_are_refused(pair, tmp_path):
    path = tmp_path / "rounds.jsonl"
    RoundFile(path, settings_of(pair))
    with pytest.raises(ValueError, match="rounds of another pair, device or length of answer"):
        RoundFile(path, settings_of(pair, max_new_tokens=41))
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="is no file of captured rounds"):
        read_rounds(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_rounds(tmp_path / "absent.jsonl")


def test_arrays_keep_prompts_and_kinds_apart(pair):
    target, drafter, sequence = pair
    captured = capture_prompt(target, drafter, prompt_of(sequence), 60, RoundRecorder(target))
    other = PromptRounds("q", "other", 0, captured.rounds[:2])
    arrays = RoundArrays.of([captured, other])
    assert arrays.num_rounds == len(captured.rounds) + 2 and arrays.num_drafts == 15
    assert arrays[arrays.kind == "other"].prompt.tolist() == [1, 1]


def test_calibration_of_one_prompt_gives_a_usable_profile(pair, tmp_path):
    target, drafter, sequence = pair
    plan = CalibrationPlan([prompt_of(sequence)], "one prompt", 60, 1, 10, str(tmp_path / "rounds.jsonl"))
    profile = calibrate(target, drafter, plan)
    assert not profile.quality.held_out and any("one prompt" in note for note in profile.notes)
    assert profile.prompt_keys == ("p",) and profile.num_rounds > 3 and profile.rho > 0
    assert 2 <= profile.static_length <= 16 and len(profile.routing.new_pairs_given[0]) == 3
    profile.save(tmp_path / "profile.json")
    assert CalibrationProfile.load(tmp_path / "profile.json") == profile
    output = target.generate(
        sequence[:, :9],
        max_new_tokens=40,
        do_sample=False,
        assistant_model=drafter,
        length_policy=parse_policy("hybridspec", profile),
    )
    assert torch.equal(output, sequence[:, :49]) and target.generation_statistics.policy == "hybridspec"
