"""C1 and Proposition 1: greedy output equals plain decoding of the stock model, token for token in fp32."""

import random

import pytest
import torch

from hf_hybridspec import Full, LengthPolicy, Static
from hf_hybridspec.modeling import block_buffers
from hf_hybridspec.modeling.dflash import DFlash2Config, DFlash2Drafter, DFlashDrafter
from hf_hybridspec.modeling.dspark import DSparkConfig, DSparkDrafter
from hf_hybridspec.modeling.hybrid_cache import HybridCache
from hf_hybridspec.modeling.ready import ReadyConfig, ReadyDrafter
from tests.conftest import character_tokenizer
from tests.scenarios import LOOPS, assisted, scripted
from tests.support import HIDDEN_SIZE, TARGETS, VOCAB_SIZE, drafter_config

PROMPT_LENGTH = 9
# Every acceptance count of a block of 16, in an order that leaves no two neighbours alike.
EVERY_COUNT = (0, 15, 1, 14, 2, 13, 3, 12, 4, 11, 5, 10, 6, 9, 7, 8)


def expected_of(pair, num_new: int) -> torch.Tensor:
    return pair.reference[:, : PROMPT_LENGTH + num_new]


def check(pair, drafter, loop, num_new, **options):
    output = assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=num_new, **options)
    assert output.tolist() == expected_of(pair, num_new).tolist()
    return pair.attached.generation_statistics


@pytest.mark.slow
@pytest.mark.parametrize("cache_implementation", ["dynamic", "static"])
@pytest.mark.parametrize("loop", LOOPS)
def test_500_tokens_with_every_acceptance_count(pair, loop, cache_implementation):
    drafter = scripted(pair.reference, EVERY_COUNT)
    statistics = check(pair, drafter, loop, 500, cache_implementation=cache_implementation)
    # Every count was met, whole blocks included; the drafter itself checks that each committed row reached it once.
    assert set(statistics.emitted) >= set(range(1, 17))
    assert set(statistics.verification_lengths[:-1]) == {16}
    assert statistics.rounds < 70


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("length", range(2, 17))
def test_every_static_length(loop, length, target_pairs):
    """Classes and caches take turns: with every fourth length and every second."""
    pair = target_pairs[TARGETS[length % 4]]
    drafter = scripted(pair.reference, [15, 0, *range(length), 15])
    options = {"cache_implementation": "static"} if length % 8 < 4 else {}
    statistics = check(pair, drafter, loop, 80, length_policy=Static(length), **options)
    assert set(statistics.verification_lengths[:3]) == {length}
    assert set(statistics.emitted) >= {1, length}


@pytest.mark.parametrize("block_size", [2, 3, 7, 16])
@pytest.mark.parametrize("loop", LOOPS)
def test_drafters_of_other_block_sizes(loop, block_size, target_pairs):
    pair = target_pairs["qwen3_next"]
    statistics = check(pair, scripted(pair.reference, (1, 0, 15, 4), block_size), loop, 60)
    assert max(statistics.verification_lengths) == block_size


# --- Real drafters with random weights ----------------------------------------------------------------------------

READER = {
    "reader_rank": 4,
    "reader_state_layers": [0, 2],
    "reader_num_heads": 4,
    "reader_key_dim": 8,
    "reader_value_dim": 16,
}
MARKOV = {"markov_rank": 8, "enable_confidence_head": True}


def dflash_values(**changes) -> dict:
    values = drafter_config().to_dict()
    return {
        key: values[key]
        for key in (
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "mask_token_id",
            "target_layer_ids",
            "num_target_layers",
        )
    } | {"hidden_size": HIDDEN_SIZE, "vocab_size": VOCAB_SIZE, "block_size": 7, **changes}


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6, "is_causal": False}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
DRAFTERS = {
    "dflash": lambda: DFlashDrafter(drafter_config()),
    "dflash sliding": lambda: DFlashDrafter(drafter_config(**SLIDING)),
    "dflash2": lambda: DFlash2Drafter(DFlash2Config(**dflash_values(**DFLASH2))),
    "dspark vanilla": lambda: DSparkDrafter(DSparkConfig(**dflash_values(**MARKOV, markov_head_type="vanilla"))),
    "dspark gated": lambda: DSparkDrafter(DSparkConfig(**dflash_values(**MARKOV, markov_head_type="gated"))),
    "dspark rnn": lambda: DSparkDrafter(DSparkConfig(**dflash_values(**MARKOV, markov_head_type="rnn"))),
    "ready": lambda: ReadyDrafter(ReadyConfig(**dflash_values(**MARKOV, **READER))),
}


def random_drafter(name: str):
    torch.manual_seed(3)
    drafter = DRAFTERS[name]().eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            # Also those that begin at zero, such as the reader's last projection.
            parameter.add_(0.2 * torch.randn_like(parameter))
    return drafter


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_kind_of_drafter(loop, name, target_pairs):
    """They are wrong most of the time, and the output is the same."""
    kind = TARGETS[list(DRAFTERS).index(name) % 4]
    drafter = random_drafter(name)
    statistics = check(target_pairs[kind], drafter, loop, 40)
    assert statistics.verification_lengths[0] == drafter.num_draft_tokens + 1


# --- Policies -----------------------------------------------------------------------------------------------------


class Adversarial(LengthPolicy):
    """Takes its lengths from what it is shown, in ways that follow the accepted tokens; notes what it was asked."""

    lookahead = 1

    def __init__(self, name: str):
        self.name = name
        self.corrections: list[tuple[int, int]] = []
        self._random = random.Random(0)

    def select(self, draft):
        longest = draft.tokens.shape[0] + 1
        wish = {
            "tokens": int(draft.tokens.sum()),
            "confidence": int(draft.confidence[0] * 1000),
            "random": self._random.randrange(100),
            "experts": 4,
        }[self.name]
        return 2 + wish % (longest - 1)

    def correct(self, nominal_length, new_experts):
        self.corrections.append((nominal_length, new_experts))
        longer = {"experts": new_experts > 0, "random": self._random.random() < 0.5}.get(
            self.name, new_experts % 2 == 0
        )
        return nominal_length + longer


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["tokens", "confidence", "experts", "random"])
def test_adversarial_lengths(pair, loop, name):
    """C11: no length rule that ends before the verification can change the output."""
    policy = Adversarial(name)
    statistics = check(pair, scripted(pair.reference, EVERY_COUNT), loop, 80, length_policy=policy)
    if loop == "host":
        # The host runs its forward whole: the correction has no place there.
        assert not policy.corrections
        return
    assert len(set(statistics.verification_lengths)) > 1 or (name, pair.kind) == ("experts", "qwen3_5")
    # At most two experts a row; a dense layer has none.
    counts = {count for _, count in policy.corrections}
    assert counts == {0} if pair.kind == "qwen3_5" else {0, 1} <= counts <= {0, 1, 2}


# --- Processors and ends of a sequence ----------------------------------------------------------------------------

PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "both": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 5},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_that_read_the_sequence(loop, name, target_pairs):
    pair = target_pairs[TARGETS[list(PROCESSORS).index(name)]]
    options = {"max_new_tokens": 80, **PROCESSORS[name]}
    expected = pair.generate_plainly(pair.prompt, **options)
    # Right by what plain decoding emits under the processor, which is not what it emits without.
    assert expected.tolist() != expected_of(pair, 80).tolist()
    output = assisted(pair.attached, pair.prompt, scripted(expected, EVERY_COUNT), loop, **options)
    assert output.tolist() == expected.tolist()
    assert pair.attached.generation_statistics.rounds < 30


END = 17


def in_block_position(position: int) -> tuple[int, ...]:
    """Right drafts of the first rounds, so that token END is emitted at `position` of the second round's block."""
    return (END - 2 - position, 15)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("position", range(16))
def test_eos_at_every_position_of_a_block(loop, position, target_pairs):
    """C5: position 15 is the target's own token after a whole block."""
    pair = target_pairs[TARGETS[position % 4]]
    eos = int(pair.reference[0, PROMPT_LENGTH + END])
    drafter = scripted(pair.reference, in_block_position(position))
    output = assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=60, eos_token_id=[eos, 0])
    assert output.tolist() == expected_of(pair, END + 1).tolist()
    assert pair.attached.generation_statistics.emitted == [END - 1 - position, position + 1]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("position", range(16))
def test_a_stop_string_at_every_position_of_a_block(loop, position, target_pairs):
    """Two characters, so that it may begin in one block and end in the next."""
    pair = target_pairs[TARGETS[(position + 1) % 4]]
    tokenizer = character_tokenizer()
    text = tokenizer.decode(pair.reference[0, PROMPT_LENGTH : PROMPT_LENGTH + 60])
    stop_string = text[END - 1 : END + 1]
    assert text.index(stop_string) == END - 1
    drafter = scripted(pair.reference, in_block_position(position))
    output = assisted(
        pair.attached,
        pair.prompt,
        drafter,
        loop,
        max_new_tokens=60,
        stop_strings=[stop_string, "never"],
        tokenizer=tokenizer,
    )
    assert output.tolist() == expected_of(pair, END + 1).tolist()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("num_new", [1, 2, 3, 16, 17, 18, 19])
def test_the_output_limit_inside_a_block(loop, num_new, target_pairs):
    pair = target_pairs[TARGETS[num_new % 4]]
    statistics = check(pair, scripted(pair.reference, (15,)), loop, num_new)
    assert sum(statistics.emitted) == num_new - 1


# --- Negative controls --------------------------------------------------------------------------------------------


def no_state_commit(monkeypatch):
    monkeypatch.setattr(block_buffers, "commit_gated_delta_rule", lambda *_: None)


def no_convolution_commit(monkeypatch):
    monkeypatch.setattr(block_buffers, "commit_causal_conv", lambda *_: None)


def no_crop_of_keys_and_values(monkeypatch):
    commit = HybridCache.commit

    def commit_without_crop(self, commit_length):
        layers = [layer for layer in self.layers if not hasattr(layer, "recurrent_states")]
        for layer in layers:
            layer.crop = lambda _: None
        commit(self, commit_length)

    monkeypatch.setattr(HybridCache, "commit", commit_without_crop)


def one_row_too_many(monkeypatch):
    """The state takes the first rejected row with it: the bug that a missing rollback is."""
    original = block_buffers.commit_gated_delta_rule
    monkeypatch.setattr(
        block_buffers, "commit_gated_delta_rule", lambda states, factors, m: original(states, factors, min(m + 1, 16))
    )


BREAKAGES = (no_state_commit, no_convolution_commit, no_crop_of_keys_and_values, one_row_too_many)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_comparison_fails_with_a_broken_commit(loop, breakage, target_pairs, monkeypatch):
    pair = target_pairs[TARGETS[BREAKAGES.index(breakage)]]
    breakage(monkeypatch)
    drafter = scripted(pair.reference, EVERY_COUNT)
    output = assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=80, length_policy=Full())
    assert output[:, :10].tolist() == expected_of(pair, 1).tolist()
    assert output.tolist() != expected_of(pair, 80).tolist()


def test_reference_does_not_repeat_itself(pair):
    """Else a wrong state could go unnoticed."""
    generated = pair.reference[0, PROMPT_LENGTH:]
    assert len(set(generated.tolist())) >= 100
    assert int(generated[END]) not in generated[:END] and 0 not in generated[:END]
