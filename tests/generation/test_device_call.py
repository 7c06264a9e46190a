"""generate() on fixed buffers: the same tokens as the eager loop and the host's, call after call."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache, set_seed
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

import hf_hybridspec
from hf_hybridspec import HybridCache, LengthPolicy, Static
from hf_hybridspec.generation import round_engine
from hf_hybridspec.generation.round_engine import RoundEngine, eager_device_rounds
from hf_hybridspec.modeling.dflash import DFlashDrafter
from hf_hybridspec.modeling.dspark import DSparkConfig, DSparkDrafter
from hf_hybridspec.modeling.ready import ReadyConfig, ReadyDrafter
from tests.generation.host_drafter import host_drafted_device_rounds
from tests.generation.test_exactness import EVERY_COUNT, MARKOV, READER, dflash_values
from tests.scenarios import assisted, image_inputs, plain, scripted
from tests.support import TARGETS, drafter_config, random_prompt, random_target

PROMPT_LENGTH = 9


@pytest.fixture(autouse=True)
def device_rounds():
    with eager_device_rounds():
        yield


def expected_of(pair, num_new: int) -> torch.Tensor:
    return pair.reference[:, : PROMPT_LENGTH + num_new]


def unpadded(input_ids: torch.Tensor) -> dict:
    """Keywords of a prompt of which no token is padding, although one may be the token that the host pads with."""
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def engines_of(model) -> list[RoundEngine]:
    return model._hybridspec.engines.engines


def real_drafter(name: str = "dflash"):
    """A random drafter of a family that is fused, not told what to draft."""
    torch.manual_seed(3)
    drafter = {
        "dflash": lambda: DFlashDrafter(drafter_config()),
        "dspark": lambda: DSparkDrafter(DSparkConfig(**dflash_values(**MARKOV, markov_head_type="vanilla"))),
        "ready": lambda: ReadyDrafter(ReadyConfig(**dflash_values(**MARKOV, **READER))),
    }[name]()
    return drafter.eval()


# --- The same tokens ------------------------------------------------------------------------------------------------


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


# --- Where a sequence stops -----------------------------------------------------------------------------------------


class StopAt(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((1,), input_ids.shape[1] >= self.length)


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


# --- Call after call ------------------------------------------------------------------------------------------------


def test_one_engine_serves_many_calls(target_pairs):
    """Policies, sampling and lengths change; buffers and steps stay."""
    pair = target_pairs["qwen3_next"]
    drafter = real_drafter()
    engines_of(pair.attached).clear()
    for options in ({}, {"length_policy": "static:4"}, {"do_sample": True}, {"length_policy": "full"}):
        pair.attached.generate(
            pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=20,
            **{"do_sample": False, **options},
        )  # fmt: skip
    assert len(engines_of(pair.attached)) == 1
    engine = engines_of(pair.attached)[0]
    output = pair.attached.generate(
        pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=20, do_sample=False
    )
    assert engines_of(pair.attached) == [engine]
    assert torch.equal(output, expected_of(pair, 20))


def test_a_longer_sequence_gets_larger_buffers(target_pairs, monkeypatch):
    pair = target_pairs["qwen3_5"]
    monkeypatch.setattr(round_engine, "SMALLEST_CAPACITY", 32)
    engines_of(pair.attached).clear()
    for num_new, capacity in ((4, 32), (30, 64), (60, 128), (5, 128)):
        output = pair.attached.generate(pair.prompt, max_new_tokens=num_new, do_sample=False, decoding_path="graphs")
        assert torch.equal(output, expected_of(pair, num_new))
        assert [engine.capacity for engine in engines_of(pair.attached)] == [capacity]
    engines_of(pair.attached).clear()


def test_two_models_and_two_drafters_take_turns(target_pairs):
    pairs = [target_pairs[kind] for kind in ("qwen3_5_moe", "qwen3_5")]
    drafters = [real_drafter(), real_drafter("dspark")]
    for _ in range(2):
        for pair in pairs:
            for drafter in drafters:
                output = pair.attached.generate(
                    pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=12, do_sample=False
                )
                assert torch.equal(output, expected_of(pair, 12))
    assert sum(engine.is_of(drafters[0]) for engine in engines_of(pairs[0].attached)) == 1


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_changed_weights_are_noticed(part):
    model = hf_hybridspec.attach(random_target("qwen3_5_moe"))
    stock, drafter, prompt = random_target("qwen3_5_moe"), real_drafter(), random_prompt(9, seed=1)

    def both():
        outputs = [
            model.generate(
                prompt,
                assistant_model=drafter,
                max_new_tokens=15,
                do_sample=False,
                decoding_path=path,
                length_policy="full",
            )
            for path in ("graphs", "round")
        ]
        assert torch.equal(*outputs)
        return outputs[0]

    before = both()
    assert torch.equal(before, stock.generate(prompt, max_new_tokens=15, do_sample=False))
    engine = engines_of(model)[0]
    with torch.no_grad():
        changed = model.model.layers[1].input_layernorm.weight if part == "target" else drafter.norm.weight
        changed.add_(torch.linspace(-1, 1, changed.shape[0]))
    after = both()
    assert engines_of(model) != [engine] and len(engines_of(model)) == 1
    assert torch.equal(after, before) == (part == "drafter")


def test_a_call_within_a_call_leaves_the_buffers_alone(target_pairs):
    """A streamer that asks the same model something: its call runs in the eager loop."""
    pair = target_pairs["qwen3_5_moe"]
    drafter, inner = real_drafter(), []

    class Asking:
        num_puts = 0

        def put(self, tokens):
            # The prompt and the prefill's token come first.
            self.num_puts += 1
            if self.num_puts == 4:
                inner.append(
                    pair.attached.generate(pair.prompt, assistant_model=drafter, max_new_tokens=9, do_sample=False)
                )
                inner.append(pair.attached.generation_statistics)

        def end(self):
            pass

    output = pair.attached.generate(
        pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=30, do_sample=False,
        streamer=Asking(),
    )  # fmt: skip
    assert torch.equal(output, expected_of(pair, 30)) and torch.equal(inner[0], expected_of(pair, 9))
    assert inner[1].path == "round" and inner[1].reason == "another call is using the buffers"


def test_a_failure_in_a_round_leaves_a_cache_that_goes_on(target_pairs):
    pair = target_pairs["qwen3_5_moe"]
    cache, drafter = HybridCache(pair.attached.config), real_drafter()
    call = {"assistant_model": drafter, "do_sample": False, "decoding_path": "graphs", "cache": cache}
    first = pair.attached.generate(pair.prompt, max_new_tokens=10, **call)
    prompt = unpadded(torch.cat([first, random_prompt(3, seed=7)], dim=1))

    class Interrupting:
        num_puts = 0

        def put(self, tokens):
            self.num_puts += 1
            if self.num_puts == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.attached.generate(**prompt, max_new_tokens=20, streamer=Interrupting(), **call)
    assert cache.committed_length == first.shape[1] - 1
    expected = plain(pair.stock, prompt, max_new_tokens=20)
    assert torch.equal(pair.attached.generate(**prompt, max_new_tokens=20, **call), expected)


def test_a_window_with_a_gap_is_left_to_the_eager_loop(target_pairs):
    """A plain turn between drafted ones leaves positions that the drafter has not seen."""
    pair = target_pairs["qwen3_5"]
    torch.manual_seed(3)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 30}
    drafter, cache = DFlashDrafter(drafter_config(**layers)).eval(), HybridCache(pair.attached.config)
    prompt, paths = pair.prompt, []
    for turn, drafts in enumerate((True, False, True)):
        inputs = unpadded(prompt)
        drafting = {"assistant_model": drafter} if drafts else {}
        output = pair.attached.generate(**inputs, max_new_tokens=8, do_sample=False, cache=cache, **drafting)
        assert torch.equal(output, plain(pair.stock, inputs, max_new_tokens=8))
        paths.append(pair.attached.generation_statistics.path)
        prompt = torch.cat([output, random_prompt(3, seed=turn)], dim=1)
    assert paths == ["graphs", "graphs", "round"]
    assert "have a gap" in pair.attached.generation_statistics.reason


def test_inference_mode_and_no_grad_share_buffers(target_pairs):
    pair = target_pairs["qwen3_5"]
    drafter = real_drafter()
    engines_of(pair.attached).clear()
    for mode in (torch.inference_mode(), torch.no_grad(), torch.inference_mode()):
        with mode:
            output = pair.attached.generate(
                pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=9, do_sample=False
            )
        assert torch.equal(output, expected_of(pair, 9))
    assert len(engines_of(pair.attached)) == 1


def test_a_copy_of_the_model_has_buffers_of_its_own(target_pairs):
    pair = target_pairs["qwen3_5"]
    pair.attached.generate(pair.prompt, max_new_tokens=4, do_sample=False, decoding_path="graphs")
    twin = copy.deepcopy(pair.attached)
    assert engines_of(pair.attached) and not engines_of(twin)
    output = twin.generate(pair.prompt, max_new_tokens=9, do_sample=False, decoding_path="graphs")
    assert torch.equal(output, expected_of(pair, 9))


# --- Plain decoding -------------------------------------------------------------------------------------------------


def test_plain_decoding_of_every_class(pair):
    pair.attached._hybridspec.statistics = None
    output = pair.attached.generate(pair.prompt, max_new_tokens=40, do_sample=False)
    assert torch.equal(output, expected_of(pair, 40))
    statistics = pair.attached.generation_statistics
    assert (statistics.path, statistics.policy, statistics.rounds) == ("graphs", "plain", 39)


@pytest.mark.parametrize("make", [lambda c: DynamicCache(config=c), lambda c: StaticCache(config=c, max_cache_len=90)])
def test_plain_turns_on_a_stock_cache(pair, make):
    """Turn by turn with the stock model's own caches, in the host's loop and in ours."""
    cache, prompt = make(pair.attached.config), pair.prompt
    for turn, path in enumerate(("graphs", "host", "graphs")):
        inputs = unpadded(prompt)
        output = pair.attached.generate(
            **inputs, max_new_tokens=12, do_sample=False, cache=cache, decoding_path=path, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, plain(pair.stock, inputs, max_new_tokens=12))
        assert output.cache is cache and int(cache.get_seq_length()) == output.sequences.shape[1] - 1
        prompt = torch.cat([output.sequences, random_prompt(3, seed=turn)], dim=1)


@pytest.mark.parametrize("place", [0, 5])
def test_plain_decoding_stops_where_the_host_does(target_pairs, place):
    pair = target_pairs["qwen3_5_moe"]
    stop = int(pair.reference[0, PROMPT_LENGTH + place])
    options = [
        {"eos_token_id": [stop]},
        {"stopping_criteria": StoppingCriteriaList([StopAt(PROMPT_LENGTH + place + 1)])},
    ]
    for option in options:
        outputs = [
            model.generate(pair.prompt, max_new_tokens=30, do_sample=False, **option)
            for model in (pair.stock, pair.attached)
        ]
        assert torch.equal(*outputs) and outputs[0].shape[1] <= PROMPT_LENGTH + place + 1


def test_plain_sampling_follows_the_seed(target_pairs):
    pair = target_pairs["qwen3_5_moe"]
    outputs = []
    for seed in (1, 1, 2):
        set_seed(seed)
        outputs.append(pair.attached.generate(pair.prompt, max_new_tokens=30, do_sample=True, top_p=0.9).tolist())
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_return_sequences": 2, "do_sample": True}, "several sequences"),
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor works on the host's scores"),
        ({"return_dict_in_generate": True, "output_scores": True}, "scores or logits"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
        ({"use_cache": False}, "there is no cache"),
    ],
)
def test_what_plain_rounds_cannot_do_is_left_to_the_host(target_pairs, options, reason):
    pair = target_pairs["qwen3_5_moe"]
    pair.attached._hybridspec.statistics = None
    with pytest.raises(ValueError, match=f"decoding_path='graphs' cannot serve this call: .*{reason}"):
        pair.attached.generate(
            pair.prompt, max_new_tokens=5, decoding_path="graphs", **{"do_sample": False, **options}
        )
    set_seed(0)
    output = pair.attached.generate(pair.prompt, max_new_tokens=5, **{"do_sample": False, **options})
    set_seed(0)
    expected = pair.stock.generate(pair.prompt, max_new_tokens=5, **{"do_sample": False, **options})
    sequences = [each if isinstance(each, torch.Tensor) else each.sequences for each in (output, expected)]
    assert torch.equal(*sequences)
    assert pair.attached.generation_statistics is None


# --- What stands in the way -----------------------------------------------------------------------------------------


class Fixed(LengthPolicy):
    name = "fixed"

    def select(self, draft):
        return 4


OBSTACLES = {
    "padding": (
        lambda pair: {
            "inputs": torch.cat([torch.zeros(1, 2, dtype=torch.long), pair.prompt], dim=1),
            "attention_mask": torch.tensor([[0, 0, *[1] * PROMPT_LENGTH]]),
        },
        "the prompt is padded",
    ),
    "a policy of one's own": (
        lambda pair: {"length_policy": Fixed()},
        "the length policy 'fixed' decides on the host",
    ),
    "scores": (lambda pair: {"return_dict_in_generate": True, "output_scores": True}, "scores or logits are"),
    "a processor": (lambda pair: {"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor works on"),
    "many stop tokens": (lambda pair: {"eos_token_id": list(range(100, 120))}, "there are 20 EOS tokens, at most 16"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_is_named_and_the_eager_loop_takes_over(target_pairs, name):
    pair = target_pairs["qwen3_5_moe"]
    make, reason = OBSTACLES[name]
    options = {"inputs": pair.prompt, "assistant_model": real_drafter(), "max_new_tokens": 12, "do_sample": False}
    options |= make(pair)
    with pytest.raises(
        ValueError, match=f"decoding_path='graphs' cannot serve this call: {reason}.*'round' or 'host'"
    ):
        pair.attached.generate(decoding_path="graphs", **options)
    pair.attached.generate(**options)
    statistics = pair.attached.generation_statistics
    assert statistics.path == "round" and reason in statistics.reason


def test_a_drafter_with_its_own_methods_is_asked_itself(target_pairs):
    pair = target_pairs["qwen3_5_moe"]
    drafter = scripted(pair.reference)
    pair.attached.generate(pair.prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)
    statistics = pair.attached.generation_statistics
    assert statistics.path == "round" and statistics.reason == "a ScriptedDrafter may draft in its own way"
    assert drafter.proposals


def test_without_room_the_eager_loop_takes_over_for_good(monkeypatch):
    model, prompt = hf_hybridspec.attach(random_target("qwen3_5")), random_prompt(9, seed=1)
    attempts = []

    def prepare(self, *args):
        attempts.append(1)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(RoundEngine, "prepare", prepare)
    outputs = []
    for _ in range(2):
        outputs.append(model.generate(prompt, assistant_model=real_drafter(), max_new_tokens=9, do_sample=False))
        assert model.generation_statistics.path == "round"
    assert len(attempts) == 1 and not engines_of(model)
    assert "found no room" in model.generation_statistics.reason
    assert torch.equal(outputs[0], random_target("qwen3_5").generate(prompt, max_new_tokens=9, do_sample=False))


def test_a_cpu_is_no_place_for_graphs(target_pairs):
    pair = target_pairs["qwen3_5_moe"]
    token = round_engine._allows_eager.set(False)
    try:
        pair.attached.generate(pair.prompt, assistant_model=real_drafter(), max_new_tokens=5, do_sample=False)
        statistics = pair.attached.generation_statistics
        assert statistics.path == "round" and "cpu device" in statistics.reason
        with pytest.raises(ValueError, match=r"decoding_path='graphs' cannot serve this call: .* cpu device"):
            pair.attached.generate(pair.prompt, max_new_tokens=5, do_sample=False, decoding_path="graphs")
    finally:
        round_engine._allows_eager.reset(token)


def test_the_host_drafter_of_these_tests_is_used(target_pairs):
    """The scripted runs above show nothing unless their drafter was asked from the device round."""
    pair = target_pairs["qwen3_5_moe"]
    drafter = scripted(pair.reference)
    with host_drafted_device_rounds():
        pair.attached.generate(pair.prompt, assistant_model=drafter, max_new_tokens=9, do_sample=False)
    assert pair.attached.generation_statistics.path == "graphs" and drafter.proposals
