"""Callbacks of training: progress with rates, new anchors for each epoch, and the loss that is no number."""

from __future__ import annotations

import math
import time

from transformers import TrainerCallback

from training.data import SampleDataset
from training.sampler import LengthBucketSampler


class NonFiniteLossError(RuntimeError):
    """The loss or a gradient was NaN or infinite; nothing was updated with it, and earlier checkpoints are whole."""


def check_finite(value: float, what: str, step: int) -> None:
    """Raises NonFiniteLossError unless `value` is a number."""
    if not math.isfinite(value):
        raise NonFiniteLossError(
            f"The {what} became {value} at step {step}. The last checkpoint is unharmed: resume from it with a lower "
            "learning_rate, or with bf16: false."
        )


class EpochSeeds(TrainerCallback):
    """Tells the data set (anchors) and the sampler (order) which epoch it is, before its first row is read."""

    def __init__(self, dataset: SampleDataset, sampler: LengthBucketSampler):
        self.members = (dataset, sampler)

    def on_epoch_begin(self, args, state, control, **kwargs):
        epoch = int((state.epoch or 0) + 1e-6)
        for member in self.members:
            member.set_epoch(epoch)


class Progress(TrainerCallback):
    """Prints a line with each log: step, loss, learning rate, tokens a second, estimated acceptance length."""

    def on_train_begin(self, args, state, control, **kwargs):
        self._start = time.monotonic()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        fields = [f"step {state.global_step}/{state.max_steps}", f"loss {logs['loss']:.4f}"]
        fields.append(f"lr {logs['learning_rate']:.2e}")
        fields.append(f"{logs['tokens_per_second']:.0f} tokens/s")
        fields.append(f"estimated acceptance length {logs['estimated_acceptance_length']:.3f}")
        print(", ".join(fields) + f", {time.monotonic() - self._start:.0f} s", flush=True)


class GradientGuard(TrainerCallback):
    """Stops before an update whose gradients are no numbers: an optimizer would carry them into every weight."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        total = 0.0
        for parameter in model.parameters():
            if parameter.grad is not None:
                total = total + parameter.grad.detach().float().abs().sum()
        check_finite(float(total), "gradient", state.global_step + 1)
