"""generate() on fixed buffers: the same tokens as the eager loop and the host's, stopped at the same token."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.generation.stopping_criteria import StoppingCriteriaList

import hf_hybridspec
from hf_hybridspec import HybridCache, Static
from hf_hybridspec.bundled import resolve
from hf_hybridspec.generation.adaptive_policies import HybridSpec
from hf_hybridspec.generation.round_engine import eager_device_rounds
from tests.generation.device_helpers import PROMPT_LENGTH, StopAt, expected_of, real_drafter, unpadded
from tests.generation.test_exactness import EVERY_COUNT
from tests.profiles import profile_of
from tests.scenarios import assisted, image_inputs, plain, scripted
from tests.support import TARGETS, random_prompt


@pytest.fixture(autouse=True)
def device_rounds():
    with eager_device_rounds():
        yield


@pytest.mark.parametrize("cache_implementation", ["dynamic", "static"])
def test_many_acceptance_counts_on_every_class(pair, cache_implementation):
    drafter = scripted(pair.reference, EVERY_COUNT)
    output = assisted(
        pair.attached, pair.prompt, drafter, "graphs", max_new_tokens=80, cache_implementation=cache_implementation
    )
    assert torch.equal(output, expected_of(pair, 80))
    assert set(pair.attached.generation_statistics.emitted) >= {1, 2, 3, 4, 14, 15, 16}


@pytest.mark.parametrize("length", range(2, 17))
def test_every_static_length(length, target_pairs):
    pair = target_pairs[TARGETS[length % 4]]
    drafter = scripted(pair.reference, [15, 0, length // 2])
    output = assisted(pair.attached, pair.prompt, drafter, "graphs", max_new_tokens=40, length_policy=Static(length))
    assert torch.equal(output, expected_of(pair, 40))
    statistics = pair.attached.generation_statistics
    assert statistics.verification_lengths[0] == length and set(statistics.emitted) >= {1, length}


@pytest.mark.parametrize("name", ["dflash", "dspark", "ready"])
def test_drafters_of_every_fused_family(name, target_pairs):
    """The fused drafter's own proposals: rounds are those of the eager loop, and so are the tokens."""
    pair = target_pairs["qwen3_5_moe"]
    results = []
    for path in ("graphs", "round"):
        output = pair.attached.generate(
            pair.prompt, assistant_model=real_drafter(name), max_new_tokens=30, do_sample=False, length_policy="full",
            decoding_path=path,
        )  # fmt: skip
        assert pair.attached.generation_statistics.path == path
        assert torch.equal(output, expected_of(pair, 30))
        results.append(pair.attached.generation_statistics.emitted)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "options", [{"temperature": 0.8, "top_k": 0}, {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.01}]
)
def test_sampling_follows_the_seed_in_either_loop(target_pairs, options):
    pair = target_pairs["qwen3_5_moe"]
    outputs = []
    for seed, loop in ((1, "graphs"), (1, "round"), (2, "graphs")):
        drafter = scripted(pair.reference)
        set_seed(seed)
        output = assisted(
            pair.attached, pair.prompt, drafter, loop, max_new_tokens=40, do_sample=True, **options
        )  # fmt: skip
        outputs.append(output.tolist())
    assert outputs[0] == outputs[1] != outputs[2]


def test_an_image_prompt_keeps_its_positions(target_pairs):
    """Positions after an image lag behind the rows in the cache."""
    pair = target_pairs["qwen3_5_moe_vl"]
    expected = plain(pair.stock, image_inputs(), max_new_tokens=30)
    drafter = scripted(expected)
    output = assisted(pair.attached, image_inputs(), drafter, "graphs", max_new_tokens=30)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}])
def test_the_bundled_pair_decodes_alike_in_both_loops(sampling):
    """Trained models: drafts are accepted, and lengths are chosen from confidence and routing."""
    target = hf_hybridspec.attach(AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float32)).eval()
    drafter = hf_hybridspec.AutoDrafter.from_pretrained(resolve("tiny-dflash"), dtype=torch.float32).eval()
    prompt = AutoTokenizer.from_pretrained(resolve("tiny"))("def add(a, b):\n    return", return_tensors="pt")
    drafter.bind(target.get_input_embeddings(), target.get_output_embeddings(), target.config)
    policy = HybridSpec(profile_of(target, drafter), is_guarded=False)
    results = []
    for path in ("graphs", "round"):
        set_seed(2)
        output = target.generate(
            **prompt, assistant_model=drafter, max_new_tokens=48, length_policy=policy, decoding_path=path, **sampling
        )
        statistics = target.generation_statistics
        assert statistics.path == path
        results.append((output.tolist(), statistics.emitted, statistics.verification_lengths))
    assert results[0] == results[1]
    assert statistics.acceptance_length > 1.2 and len(set(statistics.verification_lengths)) > 1


@pytest.mark.parametrize("num_new", [1, 2, 17, 18])
@pytest.mark.parametrize("stop", ["limit", "eos", "criterion"])
def test_stops_at_the_exact_token_and_goes_on(target_pairs, num_new, stop):
    """The cache holds all but the last token, so that the next call continues it."""
    pair = target_pairs["qwen3_5_moe"]
    cache, drafter = HybridCache(pair.attached.config), scripted(pair.reference)
    last = int(pair.reference[0, PROMPT_LENGTH + num_new - 1])
    options = {
        "limit": {"max_new_tokens": num_new},
        "eos": {"max_new_tokens": 60, "eos_token_id": [126, last]},
        "criterion": {
            "max_new_tokens": 60,
            "stopping_criteria": StoppingCriteriaList([StopAt(PROMPT_LENGTH + num_new)]),
        },
    }[stop]
    output = assisted(pair.attached, pair.prompt, drafter, "graphs", cache=cache, **options)
    expected = expected_of(pair, num_new)
    first = expected[0, PROMPT_LENGTH:].tolist().index(last) + 1
    expected = expected[:, : PROMPT_LENGTH + first] if stop == "eos" else expected
    assert torch.equal(output, expected)
    assert torch.equal(cache.token_ids, expected[:, :-1])
    assert cache.drafter_context.context.length == cache.committed_length
    for turn, loop in enumerate(("round", "graphs")):
        longer = unpadded(torch.cat([output, random_prompt(3, seed=turn)], dim=1))
        expected = plain(pair.stock, longer, max_new_tokens=20)
        drafter.script(expected[0], [2, 15, 0] * 20)
        output = assisted(pair.attached, longer, drafter, loop, max_new_tokens=20, cache=cache)
        assert torch.equal(output, expected)


def test_a_streamer_hears_every_token_once(target_pairs):
    pair = target_pairs["qwen3_5"]
    heard = []

    class Listener:
        def put(self, tokens):
            heard.extend(tokens.flatten().tolist())

        def end(self):
            heard.append("end")

    output = assisted(
        pair.attached, pair.prompt, scripted(pair.reference), "graphs", max_new_tokens=40, streamer=Listener()
    )
    assert heard == [*output[0].tolist(), "end"]
