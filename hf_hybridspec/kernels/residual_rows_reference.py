"""Rows of the residual stream in plain torch, and the norm of them: y = x / sqrt(mean(x^2) + eps) * s, in fp32.

This norm is the host's, rounded once; what is written for the Triton kernels is not read here.
"""

import torch

from .residual_rows import ResidualRows


def residual_rows(table, row_ids, output: ResidualRows) -> ResidualRows:
    """As `residual_rows.residual_rows`, into `output`."""
    return write_residual(table if row_ids is None else table.index_select(0, row_ids), output)


def write_residual(values: torch.Tensor, output: ResidualRows) -> ResidualRows:
    """Fills `output` with rows `[n, H]`, the squares of a row in one sum."""
    wide = values.float()
    output.values.copy_(values)
    output.scaled.copy_(wide * output.norm_scale)
    output.squares[0, : values.shape[0]] = wide.square().sum(dim=-1)
    return output.of_parts(1)


def normalised(rows: ResidualRows, eps: float) -> torch.Tensor:
    """`[n, H]`, the norm that follows the rows, in their dtype."""
    wide = rows.values.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * rows.norm_scale).to(rows.values.dtype)
