"""hf-hybridspec generate: decodes one prompt, streams it, and says what the rounds did."""

import argparse
import json
import sys
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..calibration.profile import CalibrationProfile
from ..calibration.timed_decode import TimedDecode
from ..generation.length_policies import HybridSpec, LengthPolicy, check_policy, parse_policy
from ..modeling.drafter import Drafter
from .checkpoints import Placement, bind_pair, check_pair, load_drafter, load_target, load_tokenizer, target_config
from .errors import CommandError
from .timing import Comparison, Request, tokens_per_second

# Interleaved runs of each kind behind a median.
COMPARED_RUNS = 3


def run_generate(options: argparse.Namespace) -> None:
    """Prints the text and its statistics, or one JSON object; raises CommandError before anything is printed."""
    placement = Placement.of(options.device, options.dtype)
    prompt = _checked_prompt(options.prompt)
    policy = _policy(options)
    config = target_config(options.target)
    # What can be refused is refused before the target's weights are read.
    tokenizer = load_tokenizer(options.target)
    inputs = encode_prompt(tokenizer, prompt, options)
    max_new_tokens = _room(config, inputs["input_ids"].shape[1], options.max_new_tokens)
    drafter = load_drafter(options.drafter, placement)
    check_pair(drafter, options.drafter, config, options.target)
    if policy is not None:
        _refuse_length(policy, drafter)
    _note_unused_options(options)
    target = load_target(options.target, placement)
    bind_pair(target, drafter, tokenizer)
    if policy is not None:
        _refuse_unfit(policy, target, drafter)

    inputs = {name: tensor.to(placement.device) for name, tensor in inputs.items()}
    request = Request(target, inputs, sampling_config(options, max_new_tokens), options.seed)
    streamer = None if options.json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    run = request.decode(drafter, policy, streamer)
    comparison = request.compare(drafter, policy, COMPARED_RUNS) if options.compare else None
    if options.json:
        text = tokenizer.decode(run.token_ids, skip_special_tokens=True)
        print(json.dumps(as_record(text, run, comparison, is_greedy=options.temperature == 0)))
    else:
        print()
        print(statistics_line(run))
        if comparison is not None:
            print(comparison_line(comparison, len(run.token_ids), options.temperature == 0, target.dtype))


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, options: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, each [1, n] int64, of the prompt as a user's turn or as it is."""
    if options.raw:
        if options.thinking is not None:
            raise CommandError(
                "--raw uses no chat template, where thinking is switched. Leave out --raw or the switch."
            )
        encoded = tokenizer(prompt, return_tensors="pt")
    else:
        template = tokenizer.chat_template
        if template is None:
            raise CommandError(f"The tokenizer of {options.target!r} has no chat template. Pass --raw.")
        switch = {} if options.thinking is None else {"enable_thinking": options.thinking}
        if switch and "enable_thinking" not in str(template):
            raise CommandError(f"The chat template of {options.target!r} has no thinking switch. Leave it out.")
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            **switch,
        )
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def sampling_config(options: argparse.Namespace, max_new_tokens: int) -> GenerationConfig:
    """Greedy at temperature 0, else sampling with exactly the given filters, whatever the checkpoint suggests."""
    if options.temperature == 0:
        return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False)
    top_p = 1.0 if options.top_p is None else options.top_p
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=options.temperature,
        top_p=top_p,
        top_k=options.top_k or 0,
    )


def as_record(text: str, run: TimedDecode, comparison: Comparison | None, is_greedy: bool) -> dict[str, Any]:
    """The object that `--json` prints; see the command's help."""
    record = {
        "text": text,
        "tokens": len(run.token_ids),
        "rounds": run.statistics.rounds,
        "acceptance_length": run.statistics.acceptance_length,
        "mean_verification_length": run.statistics.mean_verification_length,
        "path": run.statistics.path,
        "tokens_per_second": tokens_per_second(run),
    }
    if comparison is not None:
        record["tokens_per_second"] = comparison.tokens_per_second
        record["autoregressive_tokens_per_second"] = comparison.autoregressive_tokens_per_second
        record["identical_to_autoregressive"] = comparison.first_difference is None if is_greedy else None
    return record


def statistics_line(run: TimedDecode) -> str:
    """The line under the text."""
    counts = run.statistics
    reason = f", since {counts.reason}" if counts.reason else ""
    return (
        f"{len(run.token_ids)} tokens in {counts.rounds} rounds ({counts.path} path{reason}; {counts.policy}): "
        f"acceptance length {counts.acceptance_length:.2f}, "
        f"mean verification length {counts.mean_verification_length:.2f}, {tokens_per_second(run):.1f} tokens/s"
    )


def comparison_line(comparison: Comparison, num_tokens: int, is_greedy: bool, dtype: torch.dtype) -> str:
    """What `--compare` found."""
    if not is_greedy:
        verdict = "other tokens are expected when sampling: only their distribution is the same"
    elif comparison.first_difference is None:
        verdict = "identical tokens"
    else:
        verdict = f"NOT identical from token {comparison.first_difference + 1} of {num_tokens}"
        if dtype != torch.float32:
            verdict += f" (in {str(dtype).removeprefix('torch.')}, rounding can flip near-ties; try --dtype float32)"
    return (
        f"without the drafter: {verdict}; {comparison.autoregressive_tokens_per_second:.1f} tokens/s against "
        f"{comparison.tokens_per_second:.1f} with it: {comparison.speedup:.2f} times as fast "
        f"(median of {COMPARED_RUNS} interleaved runs, prefill excluded)"
    )


def _checked_prompt(prompt: str) -> str:
    if not prompt.strip():
        raise CommandError("The prompt is empty. Give --prompt at least one word.")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise CommandError("The prompt is not valid UTF-8 text. Check the encoding of the terminal or file.") from None
    return prompt


def _room(config: PreTrainedConfig, prompt_length: int, max_new_tokens: int) -> int:
    """`max_new_tokens`, or what the context leaves, with a note."""
    context = config.get_text_config(decoder=True).max_position_embeddings
    if prompt_length >= context:
        raise CommandError(
            f"The prompt has {prompt_length} tokens, the context of this target {context}, of which at least one must "
            "be left for the answer. Shorten the prompt."
        )
    room = min(max_new_tokens, context - prompt_length)
    if room < max_new_tokens:
        print(f"note: the context of {context} tokens leaves room for {room} new tokens", file=sys.stderr)
    return room


def _policy(options: argparse.Namespace) -> LengthPolicy | None:
    """The policy of --policy and --profile, or None for the stated default; raises CommandError."""
    if options.policy is None and options.profile is None:
        return None
    try:
        profile = None if options.profile is None else CalibrationProfile.load(options.profile)
        return parse_policy(options.policy or HybridSpec.name, profile)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _refuse_length(policy: LengthPolicy, drafter: Drafter) -> None:
    try:
        check_policy(policy, drafter.num_draft_tokens)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _refuse_unfit(policy: LengthPolicy, target: PreTrainedModel, drafter: Drafter) -> None:
    try:
        policy.check(target, drafter)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _note_unused_options(options: argparse.Namespace) -> None:
    if options.temperature == 0 and (options.top_p is not None or options.top_k is not None):
        print("note: --top-p and --top-k do nothing without a --temperature above 0", file=sys.stderr)
