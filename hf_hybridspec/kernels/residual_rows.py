"""Rows of the residual stream, with what the norm after them needs: whoever writes them prepares it for their readers.

A projection of a normalised row is W (x / rms(x) * s) = W (x * s) / rms(x). So x * s and the squares of x are written
with x, a reader multiplies x * s as it lies in memory, and divides its sums at the end. The arithmetic is in
`residual_rows_reference.py`.
"""

from dataclasses import dataclass

import torch

from .dispatch import implementation

MAX_ROWS = 16
# The fewest columns of a tile, whose squares are one sum.
MIN_COLUMNS = 16


@dataclass(frozen=True)
class ResidualRows:
    """n rows of the residual stream, 1 <= n <= 16.

    A norm is exact from `values` and `norm_scale`, which the reference reads. The Triton kernels read `scaled` and
    `squares`: x * s is rounded where the host rounds x * s / rms(x), an error of the same size; fp32 rows differ by
    the order of rounding alone. In fp16, x * s must stay below 65504, as x itself.

    Attributes:
        values: `[n, H]` fp32, bf16 or fp16.
        norm_scale: `[H]` fp32, the factor of the norm that follows (1 + w where the norm is zero-centred).
        scaled: `[n, H]`, values times `norm_scale`, rounded once.
        squares: `[T, 16]` fp32, sums of squares of T parts of a row, which follow its tiles; a column is a row.
    """

    values: torch.Tensor
    norm_scale: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, norm_scale: torch.Tensor, dtype: torch.dtype) -> "ResidualRows":
        """Room for rows of any tiles, on the device of their norm's factor."""
        size, device = norm_scale.shape[0], norm_scale.device
        parts = -(-size // MIN_COLUMNS)
        return cls(
            values=torch.empty(num_rows, size, dtype=dtype, device=device),
            norm_scale=norm_scale,
            scaled=torch.empty(num_rows, size, dtype=dtype, device=device),
            squares=torch.empty(parts, MAX_ROWS, dtype=torch.float32, device=device),
        )

    @property
    def shape(self) -> torch.Size:
        """`[n, H]`."""
        return self.values.shape

    def between(self, start: int, stop: int) -> "ResidualRows":
        """The rows from `start` to before `stop`, views."""
        rows = slice(start, stop)
        return ResidualRows(self.values[rows], self.norm_scale, self.scaled[rows], self.squares[:, start:])

    def of_parts(self, num_parts: int) -> "ResidualRows":
        """The same rows, whose squares are sums over so many parts."""
        return ResidualRows(self.values, self.norm_scale, self.scaled, self.squares[:num_parts])


def residual_rows(table: torch.Tensor, norm_scale: torch.Tensor, row_ids: torch.Tensor | None = None) -> ResidualRows:
    """Rows that no kernel of ours has written: embeddings, or what a module computed.

    Args:
        table: `[N, H]` fp32, bf16 or fp16.
        norm_scale: `[H]` fp32, of the norm that follows.
        row_ids: `[n]` int64, rows of the table in this order, 1 <= n <= 16; None: all of them, and N = n.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    num_rows = table.shape[0] if row_ids is None else row_ids.shape[0]
    if table.dim() != 2 or not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(
            f"table must be [N, H], of which n rows are taken with 1 <= n <= {MAX_ROWS}, got "
            f"{tuple(table.shape)} and n = {num_rows}."
        )
    if norm_scale.shape != (table.shape[1],) or norm_scale.dtype != torch.float32:
        raise ValueError(
            f"norm_scale must be fp32 ({table.shape[1]},), got {norm_scale.dtype} {tuple(norm_scale.shape)}."
        )
    if row_ids is not None and row_ids.dtype != torch.int64:
        raise ValueError(f"row_ids must be int64, got {row_ids.dtype}.")
    output = ResidualRows.empty(num_rows, norm_scale, table.dtype)
    return implementation("residual_rows", table.device).residual_rows(table, row_ids, output)


def check_residual(name: str, rows: ResidualRows, size: int | None = None) -> None:
    """Raises ValueError where `rows`, an argument called `name`, are not 1..16 rows (of `size`)."""
    shape = tuple(rows.shape)
    if len(shape) != 2 or not 1 <= shape[0] <= MAX_ROWS or size not in (None, shape[1]):
        width = "H" if size is None else size
        raise ValueError(f"{name} must hold [n, {width}] with 1 <= n <= {MAX_ROWS}, got {shape}.")
    if rows.norm_scale.shape != shape[1:] or rows.norm_scale.dtype != torch.float32:
        raise ValueError(
            f"norm_scale must be fp32 {shape[1:]}, got {rows.norm_scale.dtype} {tuple(rows.norm_scale.shape)}."
        )


def check_room(output: ResidualRows, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raises ValueError where `output` is no contiguous room for rows of this shape and dtype."""
    check_residual("output", output)
    if tuple(output.shape) != shape or output.values.dtype != dtype or not output.values.is_contiguous():
        raise ValueError(
            f"output must be contiguous {dtype} {shape}, got {output.values.dtype} {tuple(output.shape)} with "
            f"strides {output.values.stride()}."
        )
