"""Streams an answer, then says what the rounds did.

python examples/streaming.py "Tom has 3 boxes of 12 pencils. How many pencils does he have?"
"""

import sys

from transformers import AutoTokenizer, TextStreamer

import hf_hybridspec
from hf_hybridspec.bundled import resolve


def main(prompt: str, target: str = "tiny", drafter: str = "tiny-dflash", max_new_tokens: int = 200):
    tokenizer = AutoTokenizer.from_pretrained(resolve(target))
    model = hf_hybridspec.HybridSpecModelForCausalLM.from_pretrained(resolve(target), dtype="float32")
    assistant = hf_hybridspec.AutoDrafter.from_pretrained(drafter, dtype="float32")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(
        **inputs,
        assistant_model=assistant,
        length_policy="static:6",
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        return_dict_in_generate=True,
    )
    print(output.statistics.to_dict())
    return output


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Tom has 3 boxes of 12 pencils. How many pencils does he have?")
