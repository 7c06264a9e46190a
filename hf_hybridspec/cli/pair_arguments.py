"""Options that calibrate and bench share: the pair, where it runs, and the prompts."""

import argparse
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..calibration.evaluation_sets import EVALUATION_SETS
from ..calibration.prompts import BUNDLED, SPLITS
from ..modeling.drafter import Drafter
from .checkpoints import Placement, bind_pair, check_pair, load_drafter, load_target, load_tokenizer, target_config


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, drafter, device, dtype."""
    parser.add_argument(
        "--target", default="tiny", metavar="ID", help="bundled name, folder or Hub id (default: tiny)"
    )
    parser.add_argument("--drafter", default="tiny-dflash", metavar="ID", help="likewise (default: tiny-dflash)")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto (default): float32 on cpu, the checkpoint's on cuda",
    )


def add_prompt_arguments(parser: argparse.ArgumentParser, split: str, limit: int) -> None:
    """Which prompts; `split` and `limit` are the defaults."""
    parser.add_argument(
        "--prompts",
        default=BUNDLED,
        metavar="FILE|NAME",
        help=f"'{BUNDLED}' (default), a JSONL file of {{\"turns\": [...]}}, a data set "
        f"({', '.join(EVALUATION_SETS)}), or NAME=FILE",
    )
    parser.add_argument(
        "--split",
        choices=SPLITS,
        default=split,
        help=f"the half of every kind that is used, or all (default: {split}); the halves share no prompt",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the split (default: 0)")
    parser.add_argument(
        "--limit-per-kind", type=int, default=limit, metavar="N", help=f"prompts of each kind (default: {limit})"
    )
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="thinking mode of the chat template (default: the template's)",
    )


@dataclass(frozen=True)
class LoadedPair:
    """The attached target, the drafter bound to it, and the target's tokenizer."""

    target: PreTrainedModel
    drafter: Drafter
    tokenizer: PreTrainedTokenizerBase


def load_pair(options: argparse.Namespace) -> LoadedPair:
    """What the options of `add_pair_arguments` name; raises CommandError."""
    placement = Placement.of(options.device, options.dtype)
    config = target_config(options.target)
    drafter = load_drafter(options.drafter, placement)
    check_pair(drafter, options.drafter, config, options.target)
    tokenizer = load_tokenizer(options.target)
    target = load_target(options.target, placement)
    bind_pair(target, drafter, tokenizer)
    return LoadedPair(target, drafter, tokenizer)
