"""Block convolution in plain torch, fp32 inside: the CPU path and the oracle of the Triton kernel.

With x_1..x_n the rows of the block and x_0, x_-1, ... the committed history:

    y_i = silu(bias + sum_{t=0}^{kernel-1} weight[:, t] * x_{i - (kernel-1) + t})

A row reads the kernel - 1 rows before it, so the oldest column of the history is never read here; it is kept because
the host's caches hold `kernel` columns.
"""

import torch
import torch.nn.functional as F


def block_causal_conv(
    rows: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
) -> torch.Tensor:
    """As `causal_conv.block_causal_conv`."""
    num_rows = rows.shape[1]
    history = conv_state[..., 1:].transpose(1, 2).to(weight.dtype)
    inputs = torch.cat([history, rows.to(weight.dtype)], dim=1).float()
    taps = weight.float().t()
    output = inputs[:, :num_rows] * taps[0]
    for tap in range(1, taps.shape[0]):
        output.addcmul_(inputs[:, tap : tap + num_rows], taps[tap])
    if bias is not None:
        output += bias.float()
    output = output.to(weight.dtype)
    if activation == "silu":
        output = F.silu(output, inplace=True)
    return output.to(rows.dtype)


def commit_causal_conv(conv_states: torch.Tensor, rows: torch.Tensor, commit_length: int | torch.Tensor) -> None:
    """As `causal_conv.commit_causal_conv`."""
    length, kernel = int(commit_length), conv_states.shape[-1]
    if length == 0:
        return
    committed = rows[:, :, max(0, length - kernel) : length].transpose(2, 3).to(conv_states.dtype)
    kept = conv_states[..., min(length, kernel) :]
    conv_states.copy_(torch.cat([kept, committed], dim=-1))
