"""A reader-only training step against the target's own forward, and what states at many anchors cost.

    python -m training.step_time --results benchmarks/results/ready_summary.json       (27B shape, one GPU)
    python -m training.step_time --tiny --results step.json                            (bundled target, any device)

Weights are random; a step is forward of the target, forward and backward of the drafter, and the optimizer.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hf_hybridspec.bench.results_file import update_results
from hf_hybridspec.bundled import resolve
from hf_hybridspec.modeling.dspark import DSparkConfig, DSparkDrafter
from hf_hybridspec.modeling.ready import ReadyDrafter
from hf_hybridspec.modeling.target import input_embedding, text_model
from training.objective import DraftingObjective, LossWeights, TrainingBatch
from training.results import current_commit, gpu_name
from training.target_features import FrozenTarget

TARGET_27B = {
    "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
DRAFTER_27B = {"intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8,
               "head_dim": 128, "target_layer_ids": [5, 19, 33, 47, 61], "markov_rank": 256}  # fmt: skip
DRAFTER_TINY = {"intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 64, "target_layer_ids": [1, 4, 6], "markov_rank": 64}  # fmt: skip


def random_target_27b() -> PreTrainedModel:
    """The text model of the 27B's shape in bf16, filled on the GPU."""
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TARGET_27B)).bfloat16()
    model = model.to_empty(device="cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0) if name.endswith("norm.weight") else parameter.normal_(std=0.01)
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.norm.weight.fill_(1)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config).cuda()
    return model.eval()


def make_drafter(target: PreTrainedModel, shape: dict, state_layers: list[int]) -> ReadyDrafter:
    """A random ReaDy drafter whose reader alone is trained, in fp32; the rest is in the target's dtype."""
    text = target.config.get_text_config()
    config = DSparkConfig(
        vocab_size=text.vocab_size, hidden_size=text.hidden_size, num_target_layers=text.num_hidden_layers,
        block_size=7, mask_token_id=text.vocab_size - 1, **shape,
    )  # fmt: skip
    with torch.device(target.device):
        drafter = DSparkDrafter(config)
    drafter = ReadyDrafter.from_dspark(
        drafter.to(target.dtype), reader_state_layers=state_layers, reader_num_heads=text.linear_num_value_heads,
        reader_key_dim=text.linear_key_head_dim, reader_value_dim=text.linear_value_head_dim,
    )  # fmt: skip
    drafter.bind(input_embedding(target), target.get_output_embeddings(), target.config).requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if ".state_reader." in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad = True
    return drafter.train()


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    # The first run compiles and allocates.
    return statistics.median(times[1:])


def measure(target: PreTrainedModel, drafter: ReadyDrafter, options: argparse.Namespace) -> dict[str, float]:
    device = target.device
    tokens = torch.randint(1, 1000, (1, options.length), device=device)
    places = torch.randperm(options.length - 10, device=device)[: options.anchors] + 1
    anchors = places.sort().values[None]
    valid, answer = torch.ones_like(anchors, dtype=torch.bool), torch.ones_like(tokens, dtype=torch.bool)
    batch = TrainingBatch(tokens, answer, anchors, valid)
    frozen, objective = FrozenTarget(target, drafter), DraftingObjective(drafter, LossWeights(), 64)
    without = FrozenTarget(target, drafter)
    without.recurrent_layer_ids = ()
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    @torch.no_grad()
    def forward():
        return text_model(target)(input_ids=tokens, use_cache=False)

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = objective(batch, frozen.run(tokens, anchors)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = {
        "target_forward": median_seconds(forward, options.repeats),
        "target_with_taps": median_seconds(lambda: without.run(tokens, anchors), options.repeats),
        "target_with_taps_and_states": median_seconds(lambda: frozen.run(tokens, anchors), options.repeats),
        "reader_step": median_seconds(step, options.repeats),
    }
    seconds |= {"one_prefill_per_anchor_estimate": seconds["target_forward"] * options.anchors / 2}
    return seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON file; other keys in it are kept")
    parser.add_argument("--tiny", action="store_true", help="the bundled target instead of the 27B's shape")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.tiny:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        target = AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float32).to(device).eval()
        drafter = make_drafter(target, DRAFTER_TINY, [2, 6])
    else:
        target = random_target_27b()
        drafter = make_drafter(target, DRAFTER_27B, [30, 62])
    seconds = measure(target, drafter, options)
    ratio = round(seconds["reader_step"] / seconds["target_forward"], 4)
    # Without flash-linear-attention transformers runs its own torch form, which is bound by the host.
    details = {"seconds": seconds, "length": options.length, "anchors": options.anchors, "tiny": options.tiny}
    details["chunked_rule"] = "flash-linear-attention" if find_spec("fla") else "torch"
    values = {"reader_step_over_target_forward": ratio, "reader_step": details}
    update_results(options.results, values, gpu_name(), current_commit(options.commit))
    print(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
