"""Convert 8 bits to 16 in Triton: in registers, and for a whole matrix."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # where inline PTX cannot run


@triton.jit
def to_16_bits(x, dtype: tl.constexpr):
    """Convert int8 or e4m3 to `dtype`, exactly.

    The compiler converts int8 to bfloat16 by moving bits, two instructions per number. For e4m3 it uses the conversion
    unit, which has an eighth of the throughput. Moving bits works for e4m3 too: the sign, then the 7 bits of exponent
    and mantissa below bfloat16's high bits, which gives the number times 2^-120. (e4m3's NaN, which no finite number
    maps to, becomes 480.)
    """
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 high<2>, low<2>, sign<2>, power, zero;
            prmt.b32 high0, $2, 0, 0x1404;
            prmt.b32 high1, $2, 0, 0x3424;
            shr.u32 low0, high0, 4;
            shr.u32 low1, high1, 4;
            and.b32 sign0, high0, 0x80008000;
            and.b32 sign1, high1, 0x80008000;
            lop3.b32 low0, low0, 0x07F007F0, sign0, 0xEA;
            lop3.b32 low1, low1, 0x07F007F0, sign1, 0xEA;
            mov.b32 power, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, low0, power, zero;
            fma.rn.bf16x2 $1, low1, power, zero;
            }""",
            "=r,=r,r",
            [x.to(tl.int8, bitcast=True)],
            tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return x.to(dtype)


@triton.jit
def keep_layout(x):
    """Return the 8-bit `x` unchanged: a register copy across which the compiler does not move layout changes.

    The product with the values needs neighbours of one column. Without this, the compiler reorders the values while
    they are 8 bits, one byte at a time. After it they are 16 bits, which shared memory can transpose (`ldmatrix`).
    """
    if INTERPRETED:
        return x
    bits = x.to(tl.int8, bitcast=True)  # four in each register; a pure function would be moved, too
    same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], tl.int8, is_pure=False, pack=4)
    return same.to(x.dtype, bitcast=True)


@triton.jit
def dequantize_kernel(values, scales, out, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK columns of one row as `value * scale`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    if GROUP == 0:
        scale = tl.load(scales + row)
    else:
        scale = tl.load(scales + row * ((SIZE + GROUP - 1) // GROUP) + column // GROUP, mask=inside, other=0.0)
    value = tl.load(values + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, value * scale, mask=inside)
