"""A full-size drafter on fixed buffers: milliseconds of a proposal and of an observation, and share of the floor.

    python -m benchmarks.fused_drafter --output benchmarks/results/fused_drafter_h200.json

DFlash has the shape of the drafter for Qwen3.6-35B-A3B, DSpark adds a Markov head of rank 256 to it; weights are
random, times do not depend on them. The correctness gate compares a proposal with the module's own in bf16. `propose`
and `observe` are captured once each and replayed in turn. The floor is the traffic of the weights read. `--tiny` runs
the gate of small drafters on any device, without times.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from benchmarks.environment import BANDWIDTH, describe_environment, require_gpu
from benchmarks.gated_delta_rule import capture, median_times
from hf_hybridspec.modeling.dflash import DFlashConfig, DFlashDrafter
from hf_hybridspec.modeling.drafter import Drafter
from hf_hybridspec.modeling.dspark import DSparkConfig, DSparkDrafter
from hf_hybridspec.modeling.fused_drafter import FusedDrafter

FULL_SIZE = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 40,
    "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 4096,
    "mask_token_id": 248077,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
}
TINY = FULL_SIZE | {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 40,
    "mask_token_id": 299,
}
# Against the module, whose sums run in another order: near-ties among random bf16 logits flip some tokens (a wrong
# kernel would flip all), and the probabilities of the others differ slightly.
FLIPS, CONFIDENCE = 0.4, 0.1


def make_drafter(family: str, sizes: dict, device: str) -> Drafter:
    """A random bf16 drafter, bound to a random embedding and head."""
    config_class, drafter_class, more = {
        "dflash": (DFlashConfig, DFlashDrafter, {"block_size": 16}),
        "dspark": (DSparkConfig, DSparkDrafter, {"block_size": 7, "markov_rank": min(256, sizes["hidden_size"])}),
    }[family]
    with torch.device(device):
        drafter = drafter_class(config_class(**sizes, **more)).to(torch.bfloat16).eval()
        embedding = nn.Embedding(sizes["vocab_size"], sizes["hidden_size"], dtype=torch.bfloat16)
        head = nn.Linear(sizes["hidden_size"], sizes["vocab_size"], bias=False, dtype=torch.bfloat16)
    target = Qwen3_5MoeTextConfig(
        vocab_size=sizes["vocab_size"], hidden_size=sizes["hidden_size"], num_hidden_layers=sizes["num_target_layers"]
    )
    return drafter.bind(embedding, head, target)


def floor_bytes(drafter: Drafter) -> dict[str, int]:
    """Bytes of the weights that each call reads."""
    taken = sum(parameter.nbytes for parameter in drafter.layers.parameters())
    context = sum(layer.self_attn.k_proj.weight.nbytes * 2 for layer in drafter.layers)
    markov = getattr(drafter, "markov_head", None)
    chain = 0 if markov is None else drafter.num_draft_tokens * markov.markov_w2.weight.nbytes
    return {
        "propose": taken + drafter.target.head.weight.nbytes + chain,
        "observe": drafter.fc.weight.nbytes + context,
    }


class Rounds:
    """A fused drafter after a context of `length` random rows, and the tensors of its calls."""

    def __init__(self, drafter: Drafter, length: int, rows: int, device: str):
        self.drafter, self.fused = drafter, FusedDrafter(drafter, length + 512)
        self.context, self.length = drafter.new_context(), length
        width = drafter.fc.in_features
        for start in range(0, length, 2048):
            positions = torch.arange(start, min(start + 2048, length), device=device)
            features = torch.randn(positions.shape[0], width, device=device)
            drafter.observe(self.context, features.to(torch.bfloat16), positions)
        self.anchor = torch.tensor([11], device=device)
        self.features = torch.randn(rows, width, device=device).to(torch.bfloat16)
        self.commit_length = torch.zeros(1, dtype=torch.int32, device=device)
        self.fused.begin(self.context)

    def propose(self) -> None:
        self.fused.propose(self.anchor)

    def observe(self) -> None:
        self.fused.observe(self.features, self.commit_length)

    def check(self) -> float:
        """Share of tokens that differ from the module's; SystemExit if the proposals are not alike."""
        expected = self.drafter.propose(self.context, self.anchor, self.length)
        draft = self.fused.propose(self.anchor)
        same = draft.tokens == expected.tokens
        flips = 1 - same.float().mean().item()
        change = (draft.confidence / expected.confidence - 1)[same].abs()
        if not (flips <= FLIPS and bool((change <= CONFIDENCE).all())):
            raise SystemExit(f"{flips:.0%} of the tokens differ from the module's, confidences by {change.tolist()}.")
        return round(flips, 3)


def measure(family: str, length: int, replays: int) -> dict:
    rounds = Rounds(make_drafter(family, FULL_SIZE, "cuda"), length, rows=6, device="cuda")
    flips = rounds.check()
    graphs = {name: capture([getattr(rounds, name)] * 4) for name in ("propose", "observe")}
    median_times(graphs, replays=3)
    times = {name: ms / 4 for name, ms in median_times(graphs, replays).items()}
    floors = {name: count / BANDWIDTH * 1e3 for name, count in floor_bytes(rounds.drafter).items()}
    record = {"family": family, "context": length, "differing_tokens": flips}
    for name, time in times.items():
        record |= {f"{name}_ms": round(time, 4), f"{name}_fraction_of_floor": round(floors[name] / time, 3)}
    print(json.dumps(record), flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    parser.add_argument("--tiny", action="store_true", help="small drafters, checked and not timed")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.tiny:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for family in ("dflash", "dspark"):
            rounds = Rounds(make_drafter(family, TINY, device), length=90, rows=6, device=device)
            print(f"{family}: {rounds.check():.0%} of the tokens differ")
            rounds.observe()
        return
    require_gpu(parser, False)
    report = {
        "what": "proposal and observation of a drafter on fixed buffers, CUDA-graph replay, median",
        "floor_bandwidth_bytes_per_s": BANDWIDTH,
        "environment": describe_environment(arguments.commit),
        "results": [
            measure(family, length, arguments.replays) for family in ("dflash", "dspark") for length in (500, 8000)
        ],
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
