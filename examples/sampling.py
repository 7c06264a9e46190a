"""Samples with a seed: the same text every time, distributed as the target's own samples.

python examples/sampling.py
"""

from transformers import AutoTokenizer, set_seed

import hf_hybridspec
from hf_hybridspec.bundled import resolve


def main(
    prompt: str = "Write a function that adds two numbers.",
    seed: int = 0,
    target: str = "tiny",
    drafter: str = "tiny-dflash",
    max_new_tokens: int = 60,
) -> str:
    tokenizer = AutoTokenizer.from_pretrained(resolve(target))
    model = hf_hybridspec.HybridSpecModelForCausalLM.from_pretrained(resolve(target), dtype="float32")
    assistant = hf_hybridspec.AutoDrafter.from_pretrained(drafter, dtype="float32")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    set_seed(seed)
    output = model.generate(
        **inputs,
        assistant_model=assistant,
        length_policy=hf_hybridspec.Static(6),
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        top_k=20,
    )
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(text)
    return text


if __name__ == "__main__":
    main()
