"""CalibrationProfile: a whole file or none, and clear refusals."""

import json
import multiprocessing
import os
from dataclasses import replace

import pytest

from hf_hybridspec.calibration.profile import CalibrationProfile, write_atomically
from tests.profiles import NOBODY, make_profile


def test_a_saved_profile_is_read_back_equal(tmp_path):
    profile = make_profile(notes=("a note",))
    profile.save(tmp_path / "new" / "profile.json")
    assert CalibrationProfile.load(tmp_path / "new" / "profile.json") == profile


def test_a_profile_edited_by_hand_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    make_profile().save(path)
    record = json.loads(path.read_text())
    record["profile"]["rho"] *= 2
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"was changed after it was calibrated.*Run `hf-hybridspec calibrate` again"):
        CalibrationProfile.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no valid JSON"),
        ("[]", "is not a calibration profile"),
        ('{"format": "hf-hybridspec-profile", "version": 9}', "has format version 9, this is 1"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        CalibrationProfile.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        CalibrationProfile.load(tmp_path / "absent.json")


def test_every_difference_of_a_pair_is_named():
    make_profile().check_pair(replace(NOBODY, target="another name", num_draft_tokens=7))
    other = replace(NOBODY, device="NVIDIA H200", dtype="bfloat16", drafter_fingerprint="x", num_draft_tokens=20)
    with pytest.raises(
        ValueError, match=r"device is cpu.*dtype is float32.*drafter 'drafter'.*covers 15 draft tokens"
    ):
        make_profile().check_pair(other)


def test_records_of_the_wrong_size_are_refused():
    profile = make_profile()
    with pytest.raises(ValueError, match=r"costs.fitted must have 15 numbers, got 2"):
        replace(profile, costs=replace(profile.costs, fitted=(1.0, 2.0)))
    with pytest.raises(ValueError, match="must be positive"):
        replace(profile, rho=0.0)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    make_profile().save(path)
    before = path.read_text()

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_profile(rho=1.0).save(path)
    assert path.read_text() == before and os.listdir(tmp_path) == ["profile.json"]


def _write_often(path, text):
    for _ in range(50):
        write_atomically(path, text)


def test_two_processes_that_write_one_file_never_mix(tmp_path):
    path, texts = tmp_path / "file", ["a" * 200_000, "b" * 100_000]
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(path, text)) for text in texts]
    write_atomically(path, texts[0])
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in texts
    for writer in writers:
        writer.join()
    assert os.listdir(tmp_path) == ["file"]
