"""ReadyTrainer: transformers' Trainer for an adapter on a drafter, beside a frozen target."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PrinterCallback, Trainer
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_hybridspec.modeling.ready.adapter import ADAPTER_WEIGHTS, ReaderRecord, push_to_hub, save_adapter
from training.arguments import ReadyArguments
from training.callbacks import EpochSeeds, check_finite
from training.objective import DraftingObjective, TrainingBatch
from training.sampler import LengthBucketSampler
from training.setup_model import TrainingModels
from training.target_features import FrozenTarget


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; it was removed, and earlier ones are whole."""


RECIPE = "recipe.json"
TRAINER_STATE = "trainer_state.json"


@dataclass
class _Counts:
    """Sums since the last log."""

    survived: torch.Tensor
    observable: torch.Tensor
    tokens: int = 0


class ReadyTrainer(Trainer):
    """Trains `objective` with taps and states of a target that is no part of the trained model.

    Checkpoints hold the adapter, optimizer, scheduler, random states, and the recipe, which must be the same when a
    run is resumed.
    """

    def __init__(
        self, *args, models: TrainingModels, arguments: ReadyArguments, objective: DraftingObjective, **kwargs
    ):
        super().__init__(*args, model=objective, **kwargs)
        self.models = models
        self.arguments = arguments
        args = self.args
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        by_length = args.train_sampling_strategy == "group_by_length"
        self.sampler = LengthBucketSampler(self.train_dataset.lengths, batch, args.seed, by_length)
        # Our own line replaces theirs.
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(EpochSeeds(self.train_dataset, self.sampler))
        self.frozen_target = FrozenTarget(models.target.to(self.args.device), objective.drafter)
        self._record = ReaderRecord.of(objective.drafter, models.drafter_fingerprint)
        self._reset_counts()

    # ------------------------------------------------------------------------------------------------- the loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs=False, num_items_in_batch=None):
        batch = TrainingBatch(**inputs)
        output = model(batch, self.frozen_target.run(batch.tokens, batch.anchors))
        check_finite(float(output.loss.detach()), "loss", self.state.global_step + 1)
        if model.training:
            self._counts.survived += output.survived
            self._counts.observable += output.observable
            self._counts.tokens += batch.tokens.numel()
        return (output.loss, output) if return_outputs else output.loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def _get_train_sampler(self, train_dataset=None) -> LengthBucketSampler:
        return self.sampler

    # ------------------------------------------------------------------------------------------------- logging

    def _reset_counts(self) -> None:
        width = self.model.drafter.num_draft_tokens
        zeros = torch.zeros(width + 1, dtype=torch.int64, device=self.args.device)
        self._counts = _Counts(zeros[:width], zeros[width].clone())
        self._since = time.monotonic()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds tokens a second and the estimated acceptance length (1 + the draft tokens expected to be accepted, at
        anchors of the training data) to the logs of training."""
        if "loss" in logs:
            counts = torch.cat((self._counts.survived, self._counts.observable.view(1)))
            tokens = torch.tensor(float(self._counts.tokens), device=counts.device)
            counts = self.accelerator.reduce(counts, "sum")
            survival = counts[:-1].double() / counts[-1].clamp(min=1)
            logs["estimated_acceptance_length"] = round(1 + float(survival.sum()), 4)
            logs["tokens_per_second"] = float(self.accelerator.reduce(tokens, "sum")) / (
                time.monotonic() - self._since
            )
            logs |= {f"prefix_survival_{j + 1}": round(float(value), 4) for j, value in enumerate(survival)}
            self._reset_counts()
        super().log(logs, start_time)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_adapter(self.model.trained, folder, self.arguments.drafter, self._record)
        content = {"arguments": self.arguments.recipe(), "training": self._training_recipe()}
        (folder / RECIPE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _training_recipe(self) -> dict[str, Any]:
        """The Trainer's settings that a resumed run must share, whatever the split of a step over processes."""
        args = self.args
        return {
            "samples_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "samples": len(self.train_dataset),
        } | {
            name: getattr(args, name)
            for name in ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "bf16")
        }

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, SafetensorError, RuntimeError) as error:
            # Half a checkpoint must not be taken for the last one.
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"{folder} could not be written ({error}). Earlier checkpoints are whole: free some space and resume "
                "with --resume_from_checkpoint true."
            ) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        check_recipe(Path(resume_from_checkpoint), self.arguments.recipe(), self._training_recipe())
        tensors = load_file(Path(resume_from_checkpoint, ADAPTER_WEIGHTS))
        adapted = self.model.trained
        difference = sorted(tensors.keys() ^ get_peft_model_state_dict(adapted, save_embedding_layers=False).keys())
        if difference:
            raise ValueError(f"{resume_from_checkpoint} does not hold the adapter of this run: {difference}.")
        set_peft_model_state_dict(adapted, tensors)

    # ------------------------------------------------------------------------------------------------- the Hub

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Nothing yet: the adapter is uploaded once, when it is trained."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Checkpoints stay here."""

    def push_to_hub(
        self, commit_message: str | None = "End of training", blocking: bool = True, **kwargs
    ) -> str | None:
        """Uploads the adapter in output_dir to `hub_model_id`; returns the commit's address."""
        if not self.is_world_process_zero():
            return None
        return push_to_hub(
            self.args.output_dir, self.args.hub_model_id, self.args.hub_token, self.args.hub_private_repo
        )


def check_recipe(checkpoint: Path, arguments: dict[str, Any], training: dict[str, Any]) -> None:
    """Raises ValueError naming every setting in which a checkpoint differs from this run."""
    path = checkpoint / RECIPE
    if not path.is_file() or not (checkpoint / TRAINER_STATE).is_file():
        raise ValueError(f"{checkpoint} is no whole checkpoint of train_ready.py. Resume from an earlier one.")
    stored = json.loads(path.read_text(encoding="utf-8"))
    current = json.loads(json.dumps({"arguments": arguments, "training": training}))
    differences = [
        f"{name} was {stored[part].get(name)!r}, is {current[part].get(name)!r}"
        for part in ("arguments", "training")
        for name in sorted(stored[part].keys() | current[part].keys())
        if stored[part].get(name) != current[part].get(name)
    ]
    if differences:
        raise ValueError(
            f"{checkpoint} comes from another recipe: "
            + "; ".join(differences)
            + ". Use its settings, or start anew in "
            "another output_dir."
        )


def last_checkpoint(output_dir: str) -> str:
    """The newest whole checkpoint of a run. Raises ValueError where there is none."""
    found = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (path / TRAINER_STATE).is_file()]
    if not found:
        raise ValueError(
            f"{output_dir} holds no whole checkpoint to resume from. Start without resume_from_checkpoint."
        )
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2])))


def describe(objective: DraftingObjective) -> dict[str, int]:
    """Counts of a run's parameters, for its log."""
    trained = sum(p.numel() for p in objective.parameters() if p.requires_grad)
    return {"trained_parameters": trained, "parameters": sum(p.numel() for p in objective.parameters())}


def weights_of(arguments: ReadyArguments) -> dict[str, float]:
    """Keyword arguments of `LossWeights`."""
    return {"ce": arguments.ce_weight, "l1": arguments.l1_weight, "decay": arguments.position_decay}
