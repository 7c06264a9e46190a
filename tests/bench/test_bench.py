"""The calibrate and bench verbs from end to end, and the numbers that they pool."""

import json

import pytest

from hf_hybridspec.bench.records import DecodeRecord, RecordFile
from hf_hybridspec.bench.report import markdown
from hf_hybridspec.bench.summary import ALL_KINDS, summarise, summarise_alike
from hf_hybridspec.bench.systems import NAMED, choose_systems
from hf_hybridspec.calibration.profile import CalibrationProfile
from hf_hybridspec.cli.command import main
from tests.profiles import make_profile


def record(system, kind, prompt, num_tokens, seconds, lengths, digest="d", session=0) -> DecodeRecord:
    rounds = sum(lengths.values())
    counts = {str(length): count for length, count in lengths.items()}
    return DecodeRecord(system, kind, prompt, session, num_tokens, seconds, rounds, counts, digest, "round")


def test_numbers_are_pooled_within_a_kind_and_averaged_over_kinds():
    records = [
        record("ar", "a", "1", 10, 1.0, {1: 10}),
        record("ar", "a", "2", 30, 3.0, {1: 30}),
        record("ar", "b", "3", 10, 2.0, {1: 10}),
        record("full", "a", "1", 10, 1.0, {16: 5}),
        record("full", "a", "2", 30, 1.0, {16: 4, 2: 1}, digest="other"),
        record("full", "b", "3", 10, 1.0, {16: 5}),
        record("full", "b", "4", 0, 0.0, {}),
    ]
    cells = summarise(records)["full"]
    assert cells["a"].tokens_per_second == 20 and cells["a"].speed_ratio == 2.0
    assert cells["a"].acceptance_length == 4.0 and cells["a"].milliseconds_per_round == 200
    assert cells["a"].mean_length == pytest.approx(14.6) and cells["a"].identical == 0.5
    assert cells[ALL_KINDS].speed_ratio == 2.0 and cells[ALL_KINDS].acceptance_length == 3.0
    assert cells[ALL_KINDS].lengths == {2: 1, 16: 14}
    with pytest.raises(ValueError, match="No prompt gave a token"):
        summarise([record("ar", "a", "1", 0, 0.0, {})])


def test_prompts_that_are_decoded_alike_are_compared_by_themselves():
    records = [
        record("ar", "a", "1", 10, 1.0, {1: 10}),
        record("ar", "a", "2", 30, 3.0, {1: 30}),
        record("ar", "b", "3", 10, 2.0, {1: 10}),
        record("full", "a", "1", 10, 0.25, {16: 5}),
        record("full", "a", "2", 30, 1.0, {16: 30}, digest="other"),
        record("full", "b", "3", 10, 1.0, {16: 5}, digest="other"),
    ]
    alike = summarise_alike(records)
    assert (alike.num_prompts, alike.num_all) == (1, 3)
    assert set(alike.summary["full"]) == {"a", ALL_KINDS} and alike.summary["full"]["a"].speed_ratio == 4.0
    # Alike in one session is not enough.
    again = record("full", "a", "1", 10, 0.25, {16: 5}, digest="other", session=1)
    assert summarise_alike([*records, again]) is None
    assert summarise_alike([records[0], records[3]]) is None

    environment = {"device": "d", "dtype": "bfloat16", "software": "s"}
    settings = {"target": "t", "drafter": "d", "num_prompts": 3, "prompts": "p", "sessions": 1, "max_new_tokens": 30}
    page = markdown(summarise(records), settings | {"environment": environment}, None, True, alike)
    assert "1 of 3. In bfloat16 a rounding" in page and page.count("| Full length |") == 3


def test_records_continue_and_refuse_other_settings(tmp_path):
    path = tmp_path / "records.jsonl"
    file = RecordFile(path, {"tokens": 3})
    file.append(record("ar", "a", "1", 3, 1.0, {1: 3}))
    with path.open("a") as handle:
        handle.write('{"system": "full", "ki')
    resumed = RecordFile(path, {"tokens": 3})
    assert list(resumed.records) == [("ar", "1", 0)]
    resumed.append(record("full", "a", "1", 3, 1.0, {2: 2}))
    assert len(list(RecordFile(path, {"tokens": 3}))) == 2
    with pytest.raises(ValueError, match=r"other settings. Delete it, or give another --output"):
        RecordFile(path, {"tokens": 4})


def test_systems_are_those_of_the_papers_table():
    class Drafter:
        confidence_head = None

    everything = choose_systems(None, make_profile(), Drafter())
    assert set(everything) == set(NAMED) - {"confidence"}
    assert everything["static"].length_policy(make_profile()).name == "static:5"
    assert everything["vanilla"].verification == "stored" and everything["evict+replayssm"].policy == "evict"
    assert everything["hybridspec"].length_policy(make_profile()).is_guarded is False
    assert list(choose_systems(None, None, Drafter())) == ["ar", "vanilla", "replayssm", "full"]
    assert list(choose_systems(["hybridspec"], make_profile(), Drafter())) == ["ar", "hybridspec"]
    fixed = choose_systems(["static:4", "static:16"], None, Drafter())
    assert [system.length_policy(None) and system.length_policy(None).name for system in fixed.values()] == [
        None, "static:4", "static:16",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"Unknown system 'fastest'. Use some of ar, .*, static:2 to static:16\."):
        choose_systems(["fastest"], None, Drafter())
    with pytest.raises(ValueError, match="needs a calibration profile"):
        choose_systems(["evict"], None, Drafter())


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [{"kind": kind, "turns": [f"{kind} {number}?"]} for kind in ("up", "down") for number in range(2)]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return path


@pytest.mark.slow
def test_calibrate_and_bench_give_profile_tables_and_plots(saved_pair, prompts_file, tmp_path, capsys):
    pair = ["--target", str(saved_pair.target), "--drafter", str(saved_pair.drafter), "--device", "cpu"]
    prompts = ["--prompts", str(prompts_file), "--limit-per-kind", "1"]
    path, folder = tmp_path / "profile.json", tmp_path / "results"
    sizes = ["--max-new-tokens", "24", "--timed-prompts", "1", "--timed-tokens", "4"]
    assert main(["calibrate", *pair, *prompts, *sizes, "--output", str(path)]) == 0
    assert "rho" in capsys.readouterr().out
    profile = CalibrationProfile.load(path)
    assert len(profile.prompt_keys) == 2 and profile.pair.device == "cpu"

    bench = ["bench", *pair, *prompts, "--profile", str(path), "--max-new-tokens", "10", "--output", str(folder)]
    assert main(bench) == 0
    printed = capsys.readouterr()
    assert "| HybridSpec |" in printed.out and "calibrated on" not in printed.err
    results = json.loads((folder / "results.json").read_text())["results"]
    assert set(results) == set(NAMED) - {"confidence"}
    # Greedy decoding gives the target's own text under every rule and every verification.
    assert all(cells[ALL_KINDS]["identical"] == 1.0 for cells in results.values())
    assert set(results["ar"]) == {"up", "down", ALL_KINDS} and results["ar"][ALL_KINDS]["speed_ratio"] == 1.0
    for name in ("speed.png", "lengths.png", "reliability.png", "cost.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")

    # A second run measures nothing again.
    records = (folder / "records.jsonl").read_text()
    assert main(bench) == 0
    assert (folder / "records.jsonl").read_text() == records


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "--prompts", "nowhere", "--output", "p.json"], "No prompts 'nowhere'"),
        (["calibrate", "--max-new-tokens", "0", "--output", "p.json"], "--max-new-tokens must be at least 1"),
        (["bench", "--profile", "absent.json", "--output", "out"], "absent.json cannot be read"),
        (["bench", "--sessions", "0", "--output", "out"], "--sessions must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_no_file(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
