import pytest

from hf_hybridspec.bundled import resolve
from training.tiny.build_tokenizer import SPECIAL_TOKENS, build_tokenizer, train_bpe

MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "Let me see"},
]


@pytest.fixture(scope="module", params=["trained here", "bundled"])
def chat_tokenizer(request, tiny_run):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_run.tokenizer if request.param == "trained here" else resolve("tiny"))


def test_round_trip(chat_tokenizer):
    text = 'Hello, wörld!\n\n  def f(x):\n\treturn x**2  # 12345 日本 🎉\r\n"quoted"\n'
    assert chat_tokenizer.decode(chat_tokenizer(text)["input_ids"]) == text
    assert type(chat_tokenizer).__name__ == "Qwen3_5Tokenizer"


def test_special_tokens_are_single_reserved_ids(chat_tokenizer):
    ids = [chat_tokenizer.convert_tokens_to_ids(token) for token, _ in SPECIAL_TOKENS]
    assert sorted(ids) == list(range(len(chat_tokenizer) - len(SPECIAL_TOKENS), len(chat_tokenizer)))
    assert chat_tokenizer("<|im_start|><think>")["input_ids"] == [
        chat_tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<think>")
    ]
    assert chat_tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "written"),
    [(MESSAGES, "Yo<|im_end|>Let me see\n</think>\n\n4<|im_end|>"), (MESSAGES[:2], "Yo<|im_end|>")],
)
def test_the_assistant_mask_covers_what_the_model_writes(chat_tokenizer, messages, written):
    encoded = chat_tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    kept = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert chat_tokenizer.decode(kept) == written


@pytest.mark.parametrize(("thinking", "count"), [(True, 4), (False, 2)])
def test_the_prompt_is_a_prefix_of_the_trained_text(chat_tokenizer, thinking, count):
    full = chat_tokenizer.apply_chat_template(MESSAGES[:count], tokenize=True)["input_ids"]
    prompt = chat_tokenizer.apply_chat_template(
        MESSAGES[: count - 1], add_generation_prompt=True, enable_thinking=thinking
    )["input_ids"]
    assert full[: len(prompt)] == prompt


def test_tools_are_listed(chat_tokenizer):
    text = chat_tokenizer.apply_chat_template(MESSAGES[:1], tools=[{"name": "add"}], tokenize=False)
    assert '{"name": "add"}' in text and "<tool_call>" in text


def test_a_vocabulary_that_is_not_filled_is_refused():
    with pytest.raises(ValueError, match="must fill 4096 ids"):
        build_tokenizer(train_bpe(iter(["too little text"]), 4080), 4096)
