"""Trains a ReaDy adapter (state reader, then reader + LoRA), or the no-state baseline, on a pretrained DSpark drafter.

    python training/train_ready.py --config training/configs/ready_stage1.yaml [--KEY VALUE ...]
    torchrun --nproc-per-node 4 training/train_ready.py --config training/configs/ready_stage2.yaml
    accelerate launch --config_file training/configs/accelerate_ddp.yaml training/train_ready.py --config ...

The command line wins over the YAML file. Stage `reader` trains the reader alone, `joint` the reader and LoRA (start it
from stage 1 with `--adapter`), `ft` LoRA without a reader. What comes out in `output_dir` is loaded by
`hf_hybridspec.AutoDrafter.from_pretrained(output_dir)`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Run as a file: the repository's root is not on the path yet.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import TrainingArguments, set_seed

from hf_hybridspec.modeling.ready.adapter import CardFacts, write_model_card
from training.arguments import ReadyArguments, parse_arguments
from training.callbacks import GradientGuard, NonFiniteLossError, Progress
from training.collator import AnchorCollator
from training.data import SampleDataset, SampleReader, read_rows, read_template
from training.evaluation import as_metrics, read_prompts, real_acceptance
from training.objective import DraftingObjective, LossWeights
from training.setup_model import TrainingModels, load_models
from training.target_features import checksum
from training.trainer import CheckpointError, ReadyTrainer, describe, last_checkpoint, weights_of


def load_samples(arguments: ReadyArguments, models: TrainingModels, seed: int) -> SampleDataset:
    """The training samples. Raises ValueError where none is usable or a token has no row in the target's embedding."""
    reader = SampleReader(
        models.tokenizer, arguments.max_length, read_template(arguments.chat_template), arguments.enable_thinking
    )
    dataset = reader.read(read_rows(arguments.dataset, arguments.dataset_split, seed), arguments.max_samples)
    largest = max(int(sample.tokens.max()) for sample in dataset.samples)
    rows = models.target.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise ValueError(f"The data set holds token {largest}, the target's embedding {rows} rows. Use its tokenizer.")
    return dataset


def build_trainer(
    arguments: ReadyArguments, training: TrainingArguments, models: TrainingModels, dataset: SampleDataset
) -> ReadyTrainer:
    """Everything of a run, ready to train. Changes settings of `training` that the objective fixes."""
    training.remove_unused_columns = False
    # The finite-loss guard replaces the filter, which hides a NaN from the log.
    training.logging_nan_inf_filter = False
    if training.push_to_hub and not training.hub_model_id:
        raise ValueError("push_to_hub needs hub_model_id, the repository to upload to.")
    objective = DraftingObjective(
        models.adapted,
        LossWeights(**weights_of(arguments)),
        arguments.blocks_per_chunk,
        training.activation_checkpointing,
    )
    # Ours runs per layer, above; the Trainer's would look for a transformers model.
    training.activation_checkpointing = False
    padding = models.tokenizer.pad_token_id
    return ReadyTrainer(
        args=training,
        objective=objective,
        models=models,
        arguments=arguments,
        train_dataset=dataset,
        data_collator=AnchorCollator(arguments.num_anchors, 0 if padding is None else padding, training.seed),
        callbacks=[GradientGuard(), Progress()],
    )


def train(arguments: ReadyArguments, training: TrainingArguments) -> ReadyTrainer:
    """Trains and saves. Raises ValueError for what does not fit, NonFiniteLossError, CheckpointError."""
    set_seed(training.seed)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    models = load_models(arguments, dtype)
    dataset = load_samples(arguments, models, training.seed)
    trainer = build_trainer(arguments, training, models, dataset)
    if trainer.is_world_process_zero():
        print(f"Data: {dataset.report}.\nModel: {describe(trainer.model)}.", flush=True)
    before = checksum(models.target)
    resume = training.resume_from_checkpoint
    if resume is not None:
        resume = last_checkpoint(training.output_dir) if resume.lower() in ("true", "last") else resume
    trainer.train(resume_from_checkpoint=resume)
    if checksum(models.target) != before:
        raise RuntimeError("The target's weights changed during training. This adapter must not be used.")
    trainer.save_model(_internal_call=True)
    trainer.save_state()
    if trainer.is_world_process_zero():
        _finish(trainer, dataset)
    return trainer


def _finish(trainer: ReadyTrainer, dataset: SampleDataset) -> None:
    """Measures the real acceptance length, writes the model card and uploads, as asked."""
    arguments, models, drafter = trainer.arguments, trainer.models, trainer.model.drafter
    last = next((entry for entry in reversed(trainer.state.log_history) if "loss" in entry), {})
    metrics = {name: last[name] for name in ("loss", "estimated_acceptance_length") if name in last}
    if arguments.eval_prompts is not None:
        prompts = read_prompts(arguments.eval_prompts)
        summary = real_acceptance(models.target, models.tokenizer, drafter, prompts, arguments.eval_max_new_tokens)
        metrics |= as_metrics(summary)
        print("Held-out prompts: " + ", ".join(f"{name} {value:.3f}" for name, value in metrics.items()), flush=True)
    facts = CardFacts(
        arguments.drafter,
        arguments.target,
        arguments.dataset,
        arguments.stage,
        len(dataset),
        metrics,
        arguments.dataset_license,
    )
    write_model_card(trainer.args.output_dir, facts)
    if trainer.args.push_to_hub:
        print(f"Uploaded: {trainer.push_to_hub()}", flush=True)


def main(command_line: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a run that was refused or stopped, with one sentence on stderr."""
    try:
        arguments, training = parse_arguments(sys.argv[1:] if command_line is None else command_line)
        train(arguments, training)
    except (ValueError, OSError, NonFiniteLossError, CheckpointError) as error:
        print(f"train_ready: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
