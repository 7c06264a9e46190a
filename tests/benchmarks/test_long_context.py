"""The benchmark of long contexts at tiny sizes: it prefills in chunks, and times what follows the first token."""

import json

import torch

from benchmarks import long_context


def test_every_context_is_prefilled_in_chunks_and_decoded(tmp_path, monkeypatch):
    longest = []
    embed = torch.nn.Embedding.forward

    def watched(module, input_ids):
        longest.append(input_ids.shape[-1])
        return embed(module, input_ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", watched)
    path = tmp_path / "long.json"
    long_context.main(["--tiny", "--contexts", "9", "21", "--chunk", "8", "--new-tokens", "5", "--output", str(path)])
    found = json.loads(path.read_text())["contexts"]
    assert set(found) == {"9", "21"} and max(longest) == 8
    assert all(row["decode_tokens_per_second"] > 0 and row["prefill_seconds"] > 0 for row in found.values())
