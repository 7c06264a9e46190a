"""Rotary embedding of a block in Triton: one program per row."""

import triton
import triton.language as tl

from .common_triton import launch_device


@triton.jit
def _rotary_kernel(committed, offset, frequencies, cos, sin, scaling, HALF: tl.constexpr, BH: tl.constexpr):
    i_r = tl.program_id(0)
    o_d = tl.arange(0, BH)
    m_d = o_d < HALF
    position = (tl.load(committed).to(tl.int64) + tl.load(offset) + i_r).to(tl.float32)
    b_angle = position * tl.load(frequencies + o_d, mask=m_d, other=0.0)
    b_cos = (tl.cos(b_angle) * scaling).to(cos.dtype.element_ty)
    b_sin = (tl.sin(b_angle) * scaling).to(cos.dtype.element_ty)
    p_row = i_r * 2 * HALF + o_d
    tl.store(cos + p_row, b_cos, mask=m_d)
    tl.store(cos + p_row + HALF, b_cos, mask=m_d)
    tl.store(sin + p_row, b_sin, mask=m_d)
    tl.store(sin + p_row + HALF, b_sin, mask=m_d)


def rotary_rows(committed, offset, frequencies, scaling, cos, sin) -> None:
    """As `rotary.rotary_rows`, into `cos` and `sin`."""
    half = frequencies.shape[0]
    with launch_device(cos):
        _rotary_kernel[(cos.shape[0],)](
            committed, offset, frequencies, cos, sin, scaling, HALF=half, BH=triton.next_power_of_2(half), num_warps=1
        )
