"""The models of a run: frozen target, bound drafter, and the adapter that is trained on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_hybridspec.bundled import resolve
from hf_hybridspec.modeling.auto import AutoDrafter
from hf_hybridspec.modeling.dspark.modeling_dspark import DSparkDrafter
from hf_hybridspec.modeling.reader_guard import READER_MODULE
from hf_hybridspec.modeling.ready.adapter import READER_CONFIG, ReaderRecord, fingerprint
from hf_hybridspec.modeling.ready.modeling_ready import ReadyDrafter
from hf_hybridspec.modeling.target import check_supported, input_embedding, text_config
from training.arguments import ReadyArguments


@dataclass(frozen=True)
class TrainingModels:
    """target: frozen. adapted: PeftModel around the bound drafter. drafter_fingerprint: of the base drafter."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapted: PeftModel
    drafter_fingerprint: str


def load_models(arguments: ReadyArguments, dtype: torch.dtype) -> TrainingModels:
    """Loads everything. dtype: of the frozen weights; what is trained is float32.

    Raises ValueError where target, drafter, adapter and stage do not fit.
    """
    source = resolve(arguments.target)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=arguments.target_revision)
    target = AutoModelForCausalLM.from_pretrained(source, revision=arguments.target_revision, dtype=dtype)
    drafter = AutoDrafter.from_pretrained(arguments.drafter, dtype=dtype, revision=arguments.drafter_revision)
    return prepare_models(arguments, target, tokenizer, drafter)


def prepare_models(
    arguments: ReadyArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: DSparkDrafter
) -> TrainingModels:
    """As `load_models`, from loaded models."""
    check_supported(target)
    if not isinstance(drafter, DSparkDrafter) or isinstance(drafter, ReadyDrafter):
        raise ValueError(
            f"{arguments.drafter} is a {type(drafter).__name__}; training starts from a DSpark drafter. To go on with "
            "an adapter, give its base drafter as --drafter and the adapter as --adapter."
        )
    drafter.check_fit(target.config)
    base_fingerprint = fingerprint(drafter)
    record = _starting_record(arguments, base_fingerprint)
    if arguments.stage != "ft":
        reader = arguments.reader(text_config(target))
        if record is not None:
            reader = {f"reader_{name}": value for name, value in record.reader.items()}
        drafter = ReadyDrafter.from_dspark(drafter, **reader)
    drafter.bind(input_embedding(target), target.get_output_embeddings(), target.config, tokenizer_size=len(tokenizer))
    if arguments.adapter is not None:
        adapted = PeftModel.from_pretrained(drafter, arguments.adapter, is_trainable=True)
    else:
        adapted = get_peft_model(drafter, _lora_config(arguments))
    _set_trainable(adapted, arguments.stage)
    return TrainingModels(target, tokenizer, adapted, base_fingerprint)


def _starting_record(arguments: ReadyArguments, base_fingerprint: str) -> ReaderRecord | None:
    """The record of the adapter to start from; raises ValueError for one of another drafter or without a reader."""
    if arguments.adapter is None:
        return None
    path = Path(arguments.adapter, READER_CONFIG)
    if not path.is_file():
        raise ValueError(
            f"--adapter {arguments.adapter} has no {READER_CONFIG}. Give the output_dir of an earlier stage."
        )
    record = ReaderRecord.read(path)
    if record.drafter_fingerprint != base_fingerprint:
        raise ValueError(
            f"--adapter {arguments.adapter} was trained on another drafter than {arguments.drafter}. Give the drafter "
            "of its first stage."
        )
    if (record.reader is None) != (arguments.stage == "ft"):
        kind = "no" if record.reader is None else "a"
        raise ValueError(
            f"--adapter {arguments.adapter} has {kind} reader, which does not fit stage {arguments.stage}."
        )
    return record


def _lora_config(arguments: ReadyArguments) -> LoraConfig:
    return LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        target_modules=list(arguments.lora_target_modules),
        modules_to_save=None if arguments.stage == "ft" else [READER_MODULE],
    )


def _set_trainable(adapted: PeftModel, stage: str) -> None:
    """Freezes LoRA in the reader's stage (B = 0: inert), and makes what is trained float32."""
    wrapped = [name for name, module in adapted.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    if bool(wrapped) != (stage != "ft"):
        raise ValueError(f"The reader is trained in stages reader and joint only, found {wrapped} in stage {stage}.")
    for name, parameter in adapted.named_parameters():
        is_reader = f".{READER_MODULE}.modules_to_save." in name
        parameter.requires_grad = is_reader or ("lora_" in name and stage != "reader")
        if is_reader or "lora_" in name:
            parameter.data = parameter.data.float()
