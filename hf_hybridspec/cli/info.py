"""hf-hybridspec info: what a checkpoint is, and whether a pair fits."""

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..modeling.target import SUPPORTED_FAMILIES
from .checkpoints import Placement, check_pair, is_drafter, load_drafter, target_config
from .errors import CommandError

# A drafter is described as its checkpoint stores it.
AS_STORED = Placement(torch.device("cpu"), "auto")


def run_info(options: argparse.Namespace) -> None:
    """Prints a description of one checkpoint or of two, and the verdict on the pair; raises CommandError."""
    sources = [options.id] if options.other is None else [options.id, options.other]
    kinds = {source: is_drafter(source) for source in sources}
    if options.other is not None and kinds[options.id] == kinds[options.other]:
        kind = "drafters" if kinds[options.id] else "targets"
        raise CommandError(f"{options.id!r} and {options.other!r} are both {kind}. A pair is a target and a drafter.")
    loaded: dict[bool, Any] = {}
    for source, is_draft in kinds.items():
        loaded[is_draft] = load_drafter(source, AS_STORED) if is_draft else target_config(source)
        print_facts(describe_drafter(loaded[True], source) if is_draft else describe_target(loaded[False], source))
        print()
    if options.other is not None:
        target, drafter = sorted(sources, key=kinds.get)
        check_pair(loaded[True], drafter, loaded[False], target)
        print(f"{drafter} fits {target}.")


def describe_target(config: PreTrainedConfig, source: str) -> dict[str, str]:
    """Facts about a target from its config alone; no weights are read."""
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    gdn = text.layer_types.count("linear_attention")
    num_experts = getattr(text, "num_experts", None)
    return {
        "target": source,
        "family": SUPPORTED_FAMILIES[text.model_type],
        "class": (config.architectures or [type(model).__name__])[0],
        "parameters": _millions(model.num_parameters()) + " (language model)",
        "dtype": str(config.dtype or text.dtype or "not stated").removeprefix("torch."),
        "layers": f"{len(text.layer_types)} ({gdn} GDN, {len(text.layer_types) - gdn} attention)",
        "experts": f"{num_experts}, {text.num_experts_per_tok} a token" if num_experts else "none (dense)",
        "GDN heads": f"{text.linear_num_key_heads} key of {text.linear_key_head_dim}, "
        f"{text.linear_num_value_heads} value of {text.linear_value_head_dim}",
        "hidden size": str(text.hidden_size),
        "vocabulary": str(text.vocab_size),
        "context": f"{text.max_position_embeddings} tokens",
    }


def describe_drafter(drafter: Any, source: str) -> dict[str, str]:
    """Facts about a drafter."""
    facts = drafter.describe()
    sliding = facts["sliding_layers"]
    window = f", {sliding} with a window of {facts['window']}" if sliding else ""
    of_layers = f" of {facts['num_target_layers']} target layers" if facts["num_target_layers"] else ""
    return {
        "drafter": source,
        "family": facts["family"],
        "class": facts["architecture"],
        "parameters": _millions(facts["parameters"]),
        "dtype": facts["dtype"],
        "layers": f"{facts['layers']}{window}",
        "taps": ", ".join(map(str, facts["taps"])) + of_layers,
        "block": f"{facts['block_size']} rows, {facts['draft_tokens']} draft tokens",
        "alignment": facts["alignment"],
        "hidden size": str(facts["hidden_size"]),
        "vocabulary": str(facts["vocab_size"]),
        "mask token": str(facts["mask_token_id"]),
    }


def print_facts(facts: dict[str, str]) -> None:
    """One fact a line, aligned."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
