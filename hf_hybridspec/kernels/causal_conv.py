"""Causal depthwise convolution over the rows of a block: read the committed history, shift it at commit.

The arithmetic is in `causal_conv_reference.py`.
"""

import torch

from .dispatch import implementation

ACTIVATIONS = ("silu", None)


def block_causal_conv(
    rows: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
) -> torch.Tensor:
    """Convolves the n rows of a block, preceded by the committed history. Mutates nothing.

    Args:
        rows: `[B, n, C]`, rows before the convolution, fp32, bf16 or fp16.
        conv_state: `[B, C, kernel]`, the last `kernel` committed rows as columns, oldest first (transformers' layout).
        weight: `[C, kernel]`.
        bias: `[C]` or None.
        activation: `silu`, or None for the bare convolution.

    Returns:
        `[B, n, C]` in the dtype of `rows`. The sum is rounded to the dtype of `weight` before the activation, as the
        host rounds it.

    Raises:
        ValueError: a shape differs from the above, or the activation is unknown.
    """
    if rows.dim() != 3 or rows.shape[1] == 0:
        raise ValueError(f"rows must be [B, n, C] with n >= 1, got {tuple(rows.shape)}.")
    batch, _, channels = rows.shape
    if weight.dim() != 2 or weight.shape[0] != channels or (bias is not None and bias.shape != (channels,)):
        raise ValueError(
            f"weight must be [C, kernel] and bias [C] or None with C = {channels} as in rows, got "
            f"{tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}."
        )
    if conv_state.shape != (batch, channels, weight.shape[1]):
        raise ValueError(
            f"conv_state must be [B, C, kernel] = {(batch, channels, weight.shape[1])}, got {tuple(conv_state.shape)}."
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}.")
    kernels = implementation("causal_conv", rows.device)
    return kernels.block_causal_conv(rows, conv_state, weight, bias, activation)


def commit_causal_conv(conv_states: torch.Tensor, rows: torch.Tensor, commit_length: int | torch.Tensor) -> None:
    """Appends the first `commit_length` rows of the block to the history of all layers.

    Args:
        conv_states: `[L, B, C, kernel]`, changed in place: afterwards the last `kernel` columns of the old history
            followed by the committed rows. Bit-identical after a commit of 0 rows.
        rows: `[L, B, N, C]`, the rows given to `block_causal_conv`. Rows from `commit_length` on are never read.
        commit_length: 0..N, an int or an int32 or int64 tensor of one element on the states' device, which the
            Triton implementation reads on the device only (it must be in range: there it is not checked).

    Raises:
        ValueError: a shape or dtype differs from the above, or an int `commit_length` is out of range.
    """
    if conv_states.dim() != 4 or rows.dim() != 4:
        raise ValueError(
            "conv_states must be [L, B, C, kernel] and rows [L, B, N, C], got "
            f"{tuple(conv_states.shape)} and {tuple(rows.shape)}. Stack the layers in dimension 0."
        )
    layers, batch, channels, _ = conv_states.shape
    if (*rows.shape[:2], rows.shape[3]) != (layers, batch, channels) or rows.shape[2] == 0:
        raise ValueError(
            f"rows must be [L, B, N, C] with N >= 1 and L, B, C = {layers}, {batch}, {channels}, "
            f"got {tuple(rows.shape)}."
        )
    if isinstance(commit_length, torch.Tensor):
        if commit_length.numel() != 1 or commit_length.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "A commit_length on the device must be one int32 or int64 element, got "
                f"{commit_length.dtype} {tuple(commit_length.shape)}."
            )
    elif not 0 <= commit_length <= rows.shape[2]:
        raise ValueError(f"commit_length must be in [0, {rows.shape[2]}], the rows of the block, got {commit_length}.")
    implementation("causal_conv", rows.device).commit_causal_conv(conv_states, rows, commit_length)
