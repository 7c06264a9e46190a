"""transformers' own assistants, which it refuses on these models, give the plain output after attach."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from hf_hybridspec import HybridCache, attach
from tests.support import HIDDEN_SIZE, TARGETS, VOCAB_SIZE, random_prompt, random_target

NUM_NEW = 24
TEXT_TARGETS = TARGETS[:3]


@pytest.fixture
def blocks(monkeypatch):
    """Rows of each block that was committed, and how many of them were."""
    seen = []
    commit = HybridCache.commit

    def record(self, commit_length):
        seen.append((self.block_length, commit_length))
        commit(self, commit_length)

    monkeypatch.setattr(HybridCache, "commit", record)
    return seen


def check(pair, blocks, prompt=None, num_new=NUM_NEW, **options):
    """Exact, and more than one row was verified at a time."""
    prompt = pair.prompt if prompt is None else prompt
    expected = pair.generate_plainly(prompt, max_new_tokens=num_new)
    blocks.clear()
    output = pair.attached.generate(prompt, max_new_tokens=num_new, do_sample=False, **options)
    assert output.tolist() == expected.tolist()
    assert max(length for length, _ in blocks) > 1


def dense_assistant() -> PreTrainedModel:
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_a_dense_causal_assistant(pair, blocks, cache_implementation):
    check(pair, blocks, assistant_model=dense_assistant(), cache_implementation=cache_implementation)


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_the_model_as_its_own_assistant(pair, blocks, schedule):
    """Every draft is right, so the assistant's cache is rolled back by one row and the target's by none."""
    assistant = attach(random_target(pair.kind))
    assistant.generation_config.num_assistant_tokens = 6
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    # Drafting must not end early by the assistant's own doubts.
    assistant.generation_config.assistant_confidence_threshold = 0.0
    check(pair, blocks, assistant_model=assistant)
    # The target's first block; a doubt of its own never shortens it.
    assert (7, 7) in blocks and not any(1 < commit < length - 1 for length, commit in blocks)
    check(pair, blocks, assistant_model=pair.attached)


def test_an_attached_hybrid_assistant_that_is_often_wrong(pair, blocks):
    """Its drafts are rolled back in its own HybridCache, too."""
    assistant = attach(random_target("qwen3_5", seed=7))
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.assistant_confidence_threshold = 0.0
    check(pair, blocks, assistant_model=assistant)
    assert any(commit_length < length for length, commit_length in blocks)


def test_an_assistant_of_almost_equal_weights(pair, blocks):
    """Right and wrong by turns."""
    assistant = random_target(pair.kind)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(0)
        for parameter in assistant.parameters():
            parameter.add_(0.004 * torch.randn(parameter.shape, generator=noise))
    attach(assistant).generation_config.num_assistant_tokens = 5
    assistant.generation_config.assistant_confidence_threshold = 0.0
    check(pair, blocks, assistant_model=assistant)
    counts = {commit_length for length, commit_length in blocks if length > 1}
    assert len(counts) > 2


@pytest.mark.parametrize("num_tokens", [10, 20])
def test_prompt_lookup(pair, blocks, num_tokens):
    """The prompt holds its own continuation, so lookups hit; 21 rows are more than one kernel call."""
    prompt = torch.cat([pair.reference[:, :60], pair.reference[:, :12]], dim=1)
    check(pair, blocks, prompt, prompt_lookup_num_tokens=num_tokens)
    assert max(length for length, _ in blocks) == num_tokens + 1
    repeated = pair.prompt.repeat(1, 4)
    check(pair, blocks, repeated, prompt_lookup_num_tokens=num_tokens)


def test_prompt_lookup_hits(target_pairs, blocks):
    """Accepted drafts, not only proposed ones: the target is made to repeat itself."""
    pair = target_pairs["qwen3_5_moe"]
    prompt = pair.prompt.repeat(1, 3)
    options = {"max_new_tokens": 48, "do_sample": False, "sequence_bias": [[[5, 6], 30.0], [[6, 5], 30.0], [[5], 9.0]]}
    expected = pair.stock.generate(prompt, **options)
    blocks.clear()
    output = pair.attached.generate(prompt, prompt_lookup_num_tokens=10, **options)
    assert output.tolist() == expected.tolist()
    assert max(commit_length for _, commit_length in blocks) > 5


def test_prompt_lookup_with_one_and_with_three_tokens_of_prompt(pair, blocks):
    for length in (1, 3):
        prompt = random_prompt(length, seed=8)
        expected = pair.generate_plainly(prompt, max_new_tokens=12)
        output = pair.attached.generate(prompt, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
        assert output.tolist() == expected.tolist()


def test_prompt_lookup_continues_a_cache(pair):
    """Turn two over the first turn's cache: only new tokens are fed."""
    first = pair.attached.generate(
        pair.prompt, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3, return_dict_in_generate=True
    )
    second_prompt = torch.cat([first.sequences, random_prompt(4, seed=9)], dim=1)
    expected = pair.generate_plainly(second_prompt, max_new_tokens=12)
    output = pair.attached.generate(
        second_prompt, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3, cache=first.cache
    )
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("kind", TEXT_TARGETS)
def test_mtp(kind, num_layers, tmp_path, target_pairs, blocks):
    """The host reads the layers' weights from the checkpoint; random ones draft wrongly and are rolled back."""
    pair = target_pairs[kind]
    target = random_target(kind)
    target.config.num_mtp_layers = num_layers
    target.config.mtp_layer_types = ["full_attention"] * num_layers
    target.save_pretrained(tmp_path)
    torch.manual_seed(6)
    layers = {f"mtp.{name}": tensor for name, tensor in MtpModel(target, num_layers).state_dict().items()}
    weights = load_file(tmp_path / "model.safetensors")
    own = {name: tensor for name, tensor in layers.items() if name.startswith("mtp.layers")}
    save_file({**weights, **own}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = attach(type(pair.stock).from_pretrained(tmp_path).eval())
    blocks.clear()
    output = target.generate(pair.prompt, max_new_tokens=NUM_NEW, do_sample=False, use_mtp=True)
    assert output.tolist() == pair.reference[:, : 9 + NUM_NEW].tolist()
    assert {length for length, _ in blocks} >= {num_layers + 1}


class StockDFlash(PreTrainedModel):
    """What transformers' DFlash generator asks of an assistant; drafts by the embedding of the anchor alone."""

    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.mix = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, noise_embeds, context_hidden_states, position_ids, attention_mask, cache):
        num_context = context_hidden_states.shape[1]
        assert position_ids.shape[-1] == num_context + noise_embeds.shape[1]
        cache.layers[0].update(context_hidden_states[None], context_hidden_states[None])
        cache.layers[0].update(noise_embeds.repeat(1, 1, 2)[None], noise_embeds.repeat(1, 1, 2)[None])
        return BaseModelOutput(self.mix(noise_embeds + context_hidden_states[:, -1:, :HIDDEN_SIZE]))


def stock_dflash() -> StockDFlash:
    config = PreTrainedConfig(
        num_hidden_layers=1,
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        layer_types=["full_attention"],
        target_layer_ids=[0, 2],
        block_size=5,
        mask_token_id=VOCAB_SIZE - 1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return StockDFlash(config).eval()


@pytest.mark.parametrize("kind", TEXT_TARGETS)
def test_a_dflash_drafter_of_transformers(kind, target_pairs, blocks):
    check(target_pairs[kind], blocks, assistant_model=stock_dflash(), speculation_type="dflash")


def test_sampling_with_a_causal_assistant_is_reproducible(target_pairs):
    pair = target_pairs["qwen3_next"]
    outputs = []
    for _ in range(2):
        torch.manual_seed(11)
        outputs.append(
            pair.attached.generate(pair.prompt, max_new_tokens=20, do_sample=True, assistant_model=dense_assistant())
        )
    assert torch.equal(*outputs)


def test_a_hybrid_assistant_that_is_not_attached(pair, caplog):
    """Its recurrent states are never rolled back, so its drafts are poor; the output is the same, after a warning."""
    assistant, options = random_target(pair.kind, seed=7), {"max_new_tokens": 20, "do_sample": False}
    # Others may have been warned before in this process.
    logging.get_logger("transformers").warning_once.cache_clear()
    told = []
    handle = pair.attached.register_forward_pre_hook(lambda *_: told.append("attach(assistant_model)" in caplog.text))
    try:
        output = pair.attached.generate(pair.prompt, assistant_model=assistant, **options)
    finally:
        handle.remove()
    assert output.tolist() == pair.reference[:, :29].tolist()
    assert told and told[0], "warned before decoding"
    assert type(assistant).__name__ in caplog.text and "Call attach(assistant_model) as well" in caplog.text
    caplog.clear()
    logging.get_logger("transformers").warning_once.cache_clear()
    pair.attached.generate(pair.prompt, assistant_model=attach(assistant), **options)
    pair.attached.generate(pair.prompt, assistant_model=dense_assistant(), **options)
    assert "recurrent states" not in caplog.text
