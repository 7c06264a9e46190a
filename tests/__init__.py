"""Tests mirror the package. Without CUDA, Triton's interpreter runs the kernels; triton reads that when imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
