"""A drafter as a model's default: code that knows nothing of speculative decoding uses it.

python examples/pipeline.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hf_hybridspec
from hf_hybridspec.bundled import resolve


def main(
    prompt: str = "Tell me about the capital of France.",
    target: str = "tiny",
    drafter: str = "tiny-dflash",
    max_new_tokens: int = 60,
) -> str:
    tokenizer = AutoTokenizer.from_pretrained(resolve(target))
    model = AutoModelForCausalLM.from_pretrained(resolve(target), dtype="float32")
    assistant = hf_hybridspec.AutoDrafter.from_pretrained(drafter, dtype="float32")
    hf_hybridspec.attach(model, drafter=assistant, length_policy="static:6", tokenizer=tokenizer)

    chat = pipeline("text-generation", model=model, tokenizer=tokenizer)
    result = chat([{"role": "user", "content": prompt}], max_new_tokens=max_new_tokens, do_sample=False)
    text = result[0]["generated_text"][-1]["content"]
    print(text)
    print(model.generation_statistics.to_dict())

    hf_hybridspec.detach(model)
    return text


if __name__ == "__main__":
    main()
