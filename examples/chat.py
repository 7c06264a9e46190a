"""Two turns of a chat: the second feeds only what the cache of the first does not hold.

python examples/chat.py
"""

import torch
from transformers import AutoTokenizer

import hf_hybridspec
from hf_hybridspec.bundled import resolve


def main(
    turns: tuple[str, ...] = ("Tell me about the capital of France.", "And of Spain?"),
    target: str = "tiny",
    drafter: str = "tiny-dflash",
    max_new_tokens: int = 60,
) -> list[torch.Tensor]:
    """Returns the whole sequence `[1, n]` after every turn."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(target))
    assistant = hf_hybridspec.AutoDrafter.from_pretrained(drafter, dtype="float32")
    model = hf_hybridspec.HybridSpecModelForCausalLM.from_pretrained(resolve(target), dtype="float32")
    sequences, cache = [torch.zeros(1, 0, dtype=torch.long)], None
    for turn in turns:
        opening = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, tokenize=False
        )
        # The cache holds tokens, and tokenizing an answer again may give others: they are kept as they are.
        separator = "\n" if cache is not None else ""
        added = tokenizer(separator + opening, return_tensors="pt").input_ids
        prompt = torch.cat([sequences[-1], added], dim=1)
        output = model.generate(
            prompt,
            cache=cache,
            assistant_model=assistant,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        cache = output.cache
        sequences.append(output.sequences)
        answer = tokenizer.decode(output.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
        print(f"> {turn}\n{answer}\n")
    return sequences[1:]


if __name__ == "__main__":
    main()
