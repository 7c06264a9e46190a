"""Flip rates: counted until answers part, and none in fp32."""

import json

from benchmarks.flip_rate import common_prefix, flip_rate, main


def test_tokens_are_compared_until_answers_part():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2 and common_prefix([], [1]) == 0
    counted = flip_rate([[1, 2, 3], [5, 6], [7]], [[1, 2, 3], [5, 9], [7, 8]])
    assert counted == {"answers": 3, "flips": 2, "tokens": 3 + 2 + 2, "flips_per_token": round(2 / 7, 7)}


def test_no_answer_of_the_bundled_pair_flips_in_fp32(tmp_path):
    path = tmp_path / "flips.json"
    policies = ["static:3", "full"]
    options = ["--per-kind", "1", "--max-new-tokens", "12", "--dtypes", "float32", "--policies", *policies]
    main(["--output", str(path), *options])
    found = json.loads(path.read_text())["float32"]
    assert set(found["drafted"]) == set(policies) and found["plain_against_transformers"]["flips"] == 0
    for counts in found["drafted"].values():
        assert counts["against_plain"]["flips"] == 0 and counts["against_plain"]["tokens"] > 20
