"""The benchmark behind README's acceptance numbers: its counts, and that it would notice wrong tokens."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from benchmarks.acceptance import Pair, count_identical, main, measure_acceptance, measure_speed
from benchmarks.readme import RESULTS, TABLES, with_tables
from hf_hybridspec import Full, Static
from hf_hybridspec.calibration.capture import Prompt
from hf_hybridspec.calibration.timed_decode import DecodeSettings
from tests.support import random_prompt, scripted_drafter

NUM_TOKENS = 21


@pytest.fixture
def pair(target_pairs):
    """A target and a drafter of which four drafts in every block are right."""
    target, prompt = target_pairs["qwen3_5_moe"].attached, random_prompt(6)
    continuation = target.generate(prompt, max_new_tokens=NUM_TOKENS + 20, do_sample=False)[0]
    return Pair(target, scripted_drafter().script(continuation, [4]), DecodeSettings(NUM_TOKENS))


PROMPTS = [Prompt("key", "gsm", random_prompt(6))]


def test_acceptance_is_counted_over_rounds(pair):
    measured = measure_acceptance(pair, PROMPTS, [Full(), Static(3)])
    # 20 tokens follow the prefill's: 5 a round at full length, 3 a round (and 2 in the last) at length 3.
    assert measured["full"]["emitted_tokens"] == measured["static:3"]["emitted_tokens"] == 20
    assert (measured["full"]["rounds"], measured["full"]["acceptance_length"]) == (4, 5.0)
    assert (measured["static:3"]["rounds"], measured["static:3"]["acceptance_length"]) == (7, 2.857)
    assert measured["static:3"]["mean_verification_length"] <= 3


def test_identity_and_speed_notice_a_wrong_token(pair, monkeypatch):
    assert count_identical(pair, PROMPTS, [Full(), Static(4)]) == {"answers": 2, "identical": 2}
    speed = measure_speed(pair, PROMPTS, [4], num_runs=2)
    assert speed.keys() == {"autoregressive", "static:4"}
    assert speed["autoregressive"]["over_autoregressive"] == 1 and speed["static:4"]["tokens_per_second"] > 0
    decode = Pair.decode

    def corrupted(self, prompt, policy):
        run = decode(self, prompt, policy)
        return run if policy is None else replace(run, token_ids=(*run.token_ids[:-1], -1))

    monkeypatch.setattr(Pair, "decode", corrupted)
    assert count_identical(pair, PROMPTS, [Full()]) == {"answers": 1, "identical": 0}
    with pytest.raises(RuntimeError, match="Answers differ"):
        measure_speed(pair, PROMPTS, [4], num_runs=1)


def test_the_command_writes_what_the_readme_needs(saved_pair, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "acceptance_cpu.json"
    lines = [{"kind": kind, "turns": [f"{kind} {number}"]} for kind in ("gsm", "code") for number in range(2)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = {
        "--output": output,
        "--target": saved_pair.target,
        "--drafter": saved_pair.drafter,
        "--prompts": prompts,
        "--per-kind": 2,
        "--max-new-tokens": 8,
        "--lengths": 4,
        "--compared": 1,
        "--timed": 1,
        "--timed-lengths": 3,
        "--runs": 1,
    }
    threads = torch.get_num_threads()
    main([str(word) for option in options.items() for word in option])
    torch.set_num_threads(threads)
    record = json.loads(output.read_text())
    assert record["acceptance"].keys() == {"gsm", "code"}
    assert record["identity"]["code"] == {"answers": 2, "identical": 2}
    assert record["environment"]["transformers"] and record["settings"]["per_kind"] == 2
    shutil.copy(RESULTS / "h200_summary.json", tmp_path)
    readme = "".join(f"<!-- results:{name} -->\nold\n<!-- end of results:{name} -->\n" for name in TABLES)
    written = with_tables(readme, tmp_path)
    assert "| gsm | " in written and "2 of 2" in written and "| tokens/s | " in written and "old" not in written
    assert with_tables(written, tmp_path) == written
    with pytest.raises(ValueError, match="no markers"):
        with_tables("nothing here", tmp_path)
