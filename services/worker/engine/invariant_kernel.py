# pyright: basic, reportMissingImports=false
"""The Triton kernel of `products.InvariantProducts`. Importing this module needs triton, so import it lazily."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def multiply(
    out_ptr,  # [T, N], rows out_row_stride apart
    x_ptr,  # [T, K], rows x_row_stride apart
    weight_ptr,  # [N, K], rows weight_row_stride apart
    bias_ptr,  # [N]; ignored unless HAS_BIAS
    rows,
    out_row_stride,
    x_row_stride,
    weight_row_stride,
    OUTPUTS: tl.constexpr,  # N
    SIZE: tl.constexpr,  # K
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x @ weight.T + bias, one program per tile of the result. Each element is summed over K in the same order by the
    same instructions, for any T and any place of its row.
    """
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tl.program_id(1).to(tl.int64) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_row, is_output = row[:, None] < rows, output[None, :] < OUTPUTS
    dims = tl.arange(0, TILE_SIZE)
    x_ptrs = x_ptr + row[:, None] * x_row_stride + dims[None, :]
    weight_ptrs = weight_ptr + output[None, :] * weight_row_stride + dims[:, None]
    total = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    for first in range(0, SIZE, TILE_SIZE):
        if SIZE % TILE_SIZE:
            x = tl.load(x_ptrs + first, mask=is_row & (dims[None, :] < SIZE - first), other=0.0)
            weight = tl.load(weight_ptrs + first, mask=is_output & (dims[:, None] < SIZE - first), other=0.0)
        else:
            x = tl.load(x_ptrs + first, mask=is_row, other=0.0)
            weight = tl.load(weight_ptrs + first, mask=is_output, other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row[:, None] * out_row_stride + output[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=is_row & is_output,
    )
