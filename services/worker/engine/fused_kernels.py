# pyright: basic, reportMissingImports=false
"""The Triton kernels of `FusedOperations`: the operations between the matrix products of a layer. Importing this module
needs triton, so import it lazily.

Rounding matches the reference: to the tensors' dtype after adding a residual, before multiplying with a norm's weight,
and after each factor of a rotation and of an activation.
"""

import triton
import triton.language as tl

from services.worker.engine.paged_kernel import to_kv


@triton.jit
def add_and_norm(
    out_ptr,  # [T, D], contiguous
    hidden_ptr,  # [T, D], rows hidden_row_stride apart
    added_ptr,  # [T, D], rows added_row_stride apart; ignored unless HAS_ADDED
    weight_ptr,  # [D]
    hidden_row_stride,
    added_row_stride,
    eps,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,  # next power of two
    HAS_ADDED: tl.constexpr,
):
    """Write the RMS norm of the hidden states, after adding to them in place if HAS_ADDED. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, SIZE_PAD)
    inside = dims < SIZE
    hidden = tl.load(hidden_ptr + row * hidden_row_stride + dims, mask=inside, other=0.0)
    kind = hidden.dtype
    if HAS_ADDED:
        added = tl.load(added_ptr + row * added_row_stride + dims, mask=inside, other=0.0)
        hidden = (hidden.to(tl.float32) + added.to(tl.float32)).to(kind)
        tl.store(hidden_ptr + row * hidden_row_stride + dims, hidden, mask=inside)
    wide = hidden.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(kind).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + dims, (normed * weight).to(kind), mask=inside)


@triton.jit(do_not_specialize=["base_block"])
def rotate_and_write(
    qkv_ptr,  # [T, N + 2K, H], rows row_stride apart; queries are rotated in place
    kv_ptr,  # [B, 2, BLOCK_TOKENS, K, H] from base_block on, contiguous
    rotary_ptr,  # [P, 2, H]: cosines, then sines with the first half negated
    positions_ptr,  # [T] int64
    k_rows_ptr,  # [T] int64: rows of the cache viewed as [B * 2 * BLOCK_TOKENS, K * H]; -1: not written
    query_norm_ptr,  # [H]; this and key_norm_ptr are ignored unless HAS_NORM
    key_norm_ptr,
    row_stride,
    eps,
    base_block,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half a head
    HALF_PAD: tl.constexpr,  # next power of two
    BLOCK_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Normalise queries and keys if HAS_NORM, rotate them, and write keys and values to the cache. One program per tile
    of a row's heads.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, HALF_PAD)
    is_query = (heads < HEADS)[:, None]
    is_value = (heads >= HEADS + KV_HEADS)[:, None]
    inside = (heads < HEADS + 2 * KV_HEADS)[:, None] & (dims < HALF)[None, :]
    at = row * row_stride + heads[:, None] * (2 * HALF) + dims[None, :]
    low = tl.load(qkv_ptr + at, mask=inside, other=0.0)
    high = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0)
    kind = low.dtype
    x_low, x_high = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        mean_square = (tl.sum(x_low * x_low, 1) + tl.sum(x_high * x_high, 1)) / (2 * HALF)
        scale = tl.rsqrt(mean_square + eps)[:, None]
        weights = tl.where(is_query, query_norm_ptr + dims[None, :], key_norm_ptr + dims[None, :])
        low_weight = tl.load(weights, mask=inside, other=0.0).to(tl.float32)
        high_weight = tl.load(weights + HALF, mask=inside, other=0.0).to(tl.float32)
        x_low = ((x_low * scale).to(kind).to(tl.float32) * low_weight).to(kind).to(tl.float32)
        x_high = ((x_high * scale).to(kind).to(tl.float32) * high_weight).to(kind).to(tl.float32)
    angles = rotary_ptr + tl.load(positions_ptr + row) * (4 * HALF) + dims
    cos = tl.load(angles, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + 3 * HALF, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    rotated_low = ((x_low * cos).to(kind).to(tl.float32) - x_high * sin).to(kind)
    rotated_high = ((x_high * cos).to(kind).to(tl.float32) + x_low * sin).to(kind)
    tl.store(qkv_ptr + at, rotated_low, mask=inside & is_query)
    tl.store(qkv_ptr + at + HALF, rotated_high, mask=inside & is_query)
    kv_heads = heads[:, None] - HEADS - tl.where(is_value, KV_HEADS, 0)
    k_row = tl.load(k_rows_ptr + row)
    kept = inside & ~is_query & (k_row >= 0)
    kv_rows = k_row - base_block * (2 * BLOCK_TOKENS) + tl.where(is_value, BLOCK_TOKENS, 0)
    kv_at = (kv_rows * KV_HEADS + kv_heads) * (2 * HALF) + dims[None, :]
    stored = kv_ptr.dtype.element_ty
    tl.store(kv_ptr + kv_at, to_kv(tl.where(is_value, low, rotated_low), stored), mask=kept)
    tl.store(kv_ptr + kv_at + HALF, to_kv(tl.where(is_value, high, rotated_high), stored), mask=kept)


@triton.jit
def activate(
    gate_up_ptr,  # [T, 2I], rows row_stride apart
    row_stride,
    SIZE: tl.constexpr,  # I
    TILE: tl.constexpr,
):
    """Overwrite the gates with SiLU(gate) * up. One program per tile of a row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = dims < SIZE
    at = gate_up_ptr + row * row_stride + dims
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(at, (activated * up).to(gate.dtype), mask=inside)
