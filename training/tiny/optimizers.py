"""Optimizers of the tiny models: float32 masters of a model that computes in another type."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class MasterAdamW:
    """AdamW over float32 masters of a model's trainable weights; matrices decay, vectors do not.

    With `muon`, matrices outside the embedding follow momentum orthogonalised by Newton-Schulz instead, which needs
    fewer steps; `learning_rate` is then theirs and `learning_rate / 10` that of the vectors.
    """

    def __init__(self, model: nn.Module, learning_rate: float, weight_decay: float, muon: bool = False):
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [parameter.detach().float().clone().requires_grad_() for parameter in self.parameters]
        matrices = [master for master in self.masters if master.ndim > 1]
        vectors = [master for master in self.masters if master.ndim <= 1]
        self.orthogonalised = matrices if muon else []
        self._momentum = [torch.zeros_like(master) for master in self.orthogonalised]
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self._adam_rate = learning_rate / 10 if muon else learning_rate
        groups = [{"params": vectors, "weight_decay": 0.0}]
        if not muon:
            groups.append({"params": matrices, "weight_decay": weight_decay})
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=self.masters[0].is_cuda)

    def step(self, factor: float, clip: float = 1.0) -> Tensor:
        """One update at `factor` times the learning rate; returns the gradient norm, which must be finite to count."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.to(torch.float32)
            parameter.grad = None
        gradients = [master.grad for master in self.masters]
        norm = nn.utils.clip_grad_norm_(self.masters, clip, foreach=True)
        finite = torch.isfinite(norm)
        for gradient in gradients:
            gradient.copy_(torch.where(finite, gradient, 0.0))
        for group in self.optimizer.param_groups:
            group["lr"] = self._adam_rate * factor
        self.optimizer.step()
        with torch.no_grad():
            if self.orthogonalised:
                self._muon_step(self.learning_rate * factor)
            torch._foreach_copy_(self.parameters, self.masters)
        return norm

    def _muon_step(self, rate: float) -> None:
        by_shape: dict[torch.Size, list[int]] = {}
        for i, master in enumerate(self.orthogonalised):
            self._momentum[i].lerp_(master.grad, 0.05)
            by_shape.setdefault(master.shape, []).append(i)
        for shape, indices in by_shape.items():
            directions = torch.stack([self.orthogonalised[i].grad.lerp(self._momentum[i], 0.95) for i in indices])
            updates = orthogonalise(directions) * math.sqrt(max(1.0, shape[-2] / shape[-1]))
            for i, update in zip(indices, updates, strict=True):
                self.orthogonalised[i].mul_(1 - rate * self.weight_decay).sub_(rate * update)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices to [N, rows, columns], roughly: a quintic Newton-Schulz iteration."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.transpose(-1, -2) if tall else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


def schedule(progress: float, warmup: float = 0.02, floor: float = 0.02) -> float:
    """Learning-rate factor at `progress` in [0, 1]: linear warm-up, then cosine down to `floor`."""
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    part = min((progress - warmup) / (1 - warmup), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * part))
