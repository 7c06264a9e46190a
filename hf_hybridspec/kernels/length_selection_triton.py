"""Length selection in Triton: one program each, nothing read on the host.

A few hundred numbers are read, so one small program is bound by its launch; the running average and the prefix sums
are products with small matrices held in registers instead of loops over positions.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .common_triton import launch_device

if TYPE_CHECKING:
    from .length_selection import LengthTables, Selection

ENTROPY_FLOOR = tl.constexpr(1e-4)
# Stands for a score or logarithm that nothing chooses.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _interpolate(b_x, p_knots, p_values, stride, drafts, K: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr):
    """Values `[BD]` at b_x between knots: neighbours by masked maxima and minima, since both rows ascend."""
    o_d, o_k = tl.arange(0, BD), tl.arange(0, BK)
    m_knot = (o_d < drafts)[:, None] & (o_k < K)[None, :]
    o_knot = o_d[:, None] * stride + o_k[None, :]
    b_knot = tl.load(p_knots + o_knot, mask=m_knot, other=0.0)
    b_value = tl.load(p_values + o_knot, mask=m_knot, other=0.0)
    m_low = m_knot & (b_knot <= b_x[:, None])
    m_high = m_knot & (b_knot > b_x[:, None])
    x0 = tl.max(tl.where(m_low, b_knot, LOWEST), axis=1)
    y0 = tl.max(tl.where(m_low, b_value, LOWEST), axis=1)
    x1 = tl.min(tl.where(m_high, b_knot, -LOWEST), axis=1)
    y1 = tl.min(tl.where(m_high, b_value, -LOWEST), axis=1)
    m_inside = (x0 > LOWEST) & (x1 < -LOWEST)
    share = tl.where(m_inside, b_x - x0, 0.0) / tl.where(m_inside, x1 - x0, 1.0)
    b_base = tl.where(x0 > LOWEST, y0, y1)
    return b_base + share * tl.where(m_inside, y1 - y0, 0.0)


@triton.jit
def _select_kernel(
    confidence, entropy, knots, values, average, weights, costs,
    prefix_probs, nominal_length, length,
    stride_k, stride_a, drafts,
    K: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    o_d = tl.arange(0, BD)
    m_d = o_d < drafts
    b_confidence = tl.load(confidence + o_d, mask=m_d, other=0.0)
    b_entropy = tl.load(entropy + o_d, mask=m_d, other=0.0)
    b_calibrated = _interpolate(b_confidence, knots, values, stride_k, drafts, K, BD, BK)

    m_pair = m_d[:, None] & m_d[None, :]
    b_average = tl.load(average + o_d[:, None] * stride_a + o_d[None, :], mask=m_pair, other=0.0)
    b_average = tl.maximum(tl.sum(b_average * b_entropy[None, :], axis=1), ENTROPY_FLOOR)
    b_change = tl.log(tl.maximum(b_entropy, ENTROPY_FLOOR) / b_average)
    b_position = (o_d + 1).to(tl.float32)
    b_logit = (
        tl.load(weights + 5)
        + tl.load(weights) * b_calibrated
        + tl.load(weights + 1) * b_position
        + tl.load(weights + 2) * b_calibrated * b_position
        + tl.load(weights + 3) * tl.log(1.0 + b_entropy)
        + tl.load(weights + 4) * b_change
    )
    b_conditional = tl.where(m_d, 1.0 / (1.0 + tl.exp(-b_logit)), 0.0)
    b_prefix = tl.cumprod(b_conditional, axis=0)
    tl.store(prefix_probs + o_d, b_prefix, mask=m_d)

    b_cost = tl.load(costs + o_d, mask=m_d, other=0.0)
    b_score = tl.where(m_d, tl.cumsum(b_prefix, axis=0) - b_cost, LOWEST)
    # The first of equal scores is the shorter length.
    best = tl.min(tl.where(b_score == tl.max(b_score, axis=0), o_d, BD), axis=0) + 2
    tl.store(nominal_length, best)
    tl.store(length, best)


@triton.jit
def _correct_kernel(new_experts, costs, prefix_probs, nominal_length, length, stride_c, num_counts, drafts):
    nominal = tl.load(nominal_length)
    position = tl.minimum(nominal - 1, drafts - 1)
    count = tl.minimum(tl.maximum(tl.load(new_experts).to(tl.int32), 0), num_counts - 1)
    cost = tl.load(costs + position * stride_c + count)
    is_worth = (tl.load(prefix_probs + position) > cost) & (nominal <= drafts)
    tl.store(length, nominal + is_worth.to(tl.int32))


@triton.jit
def _count_kernel(
    top_k_index, nominal_length, count, stride_u, stride_k, num_rows, top_k,
    BU: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.load(nominal_length)
    o_u, o_k = tl.arange(0, BU), tl.arange(0, BK)
    m_k = o_k < top_k
    b_newest = tl.load(top_k_index + row * stride_u + o_k * stride_k, mask=m_k, other=-1)
    m_earlier = ((o_u < num_rows) & (o_u < row))[:, None] & m_k[None, :]
    b_earlier = tl.load(top_k_index + o_u[:, None] * stride_u + o_k[None, :] * stride_k, mask=m_earlier, other=-2)
    b_same = (b_earlier[:, :, None] == b_newest[None, None, :]).to(tl.int32)
    b_hits = tl.sum(tl.sum(b_same, axis=0), axis=0)
    tl.store(count, tl.sum(((b_hits == 0) & m_k).to(tl.int32), axis=0))


def select_length(
    confidence: torch.Tensor, entropy: torch.Tensor, tables: "LengthTables", selection: "Selection"
) -> None:
    """As `length_selection.select_length`."""
    drafts, num_knots = confidence.shape[0], tables.confidence_knots.shape[1]
    with launch_device(confidence):
        _select_kernel[(1,)](
            confidence.contiguous(), entropy.contiguous(),
            tables.confidence_knots, tables.acceptance_knots, tables.entropy_average, tables.weights,
            tables.token_costs, selection.prefix_probs, selection.nominal_length, selection.length,
            tables.confidence_knots.stride(0), tables.entropy_average.stride(0), drafts,
            K=num_knots, BD=triton.next_power_of_2(drafts), BK=triton.next_power_of_2(num_knots), num_warps=1,
        )  # fmt: skip


def correct_length(new_experts: torch.Tensor, tables: "LengthTables", selection: "Selection") -> None:
    """As `length_selection.correct_length`."""
    costs = tables.correction_costs
    with launch_device(new_experts):
        _correct_kernel[(1,)](
            new_experts, costs, selection.prefix_probs, selection.nominal_length, selection.length,
            costs.stride(0), costs.shape[1], selection.prefix_probs.shape[0], num_warps=1,
        )  # fmt: skip


def count_new_experts(top_k_index: torch.Tensor, nominal_length: torch.Tensor) -> torch.Tensor:
    """As `length_selection.count_new_experts`."""
    num_rows, top_k = top_k_index.shape
    count = nominal_length.new_empty(1)
    with launch_device(top_k_index):
        _count_kernel[(1,)](
            top_k_index, nominal_length, count, *top_k_index.stride(), num_rows, top_k,
            BU=triton.next_power_of_2(num_rows), BK=triton.next_power_of_2(top_k), num_warps=4,
        )  # fmt: skip
    return count
