# pyright: basic, reportMissingImports=false
"""The Triton kernel behind `CudaAttention`. Importing this module needs triton; nothing else may import it eagerly.

One program computes a tile: a few consecutive rows of one sequence, for all query heads that share one KV head. Decodes
are tiles of one row. K and V are read where they lie, through the sequence's block table, from the layer's base
address, which never changes.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


# Every value of a specialised argument may cost a compilation in the middle of a step.
@triton.jit(do_not_specialize=["table_width"])
def paged_attention(
    out_ptr,  # [T, N, H], contiguous
    q_ptr,  # [T, N, H], rows q_row_stride apart
    kv_ptr,  # [B, 2, BLOCK_TOKENS, K, H], contiguous
    tables_ptr,  # [S, table_width] int32
    tiles_ptr,  # [tiles, 4] int32: table, first row, rows, position of the first row
    q_row_stride,
    table_width,
    scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,  # the next power of two
    BLOCK_TOKENS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,  # rows x GROUPS, padded
    TILE_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    table = tl.load(tiles_ptr + tile * 4)
    first_row = tl.load(tiles_ptr + tile * 4 + 1)
    rows = tl.load(tiles_ptr + tile * 4 + 2)
    first_position = tl.load(tiles_ptr + tile * 4 + 3)

    queries = tl.arange(0, TILE_QUERIES)
    dims = tl.arange(0, HEAD_PAD)
    query_rows = queries // GROUPS
    query_heads = kv_head * GROUPS + queries % GROUPS
    live = (query_rows < rows)[:, None] & (dims < HEAD_DIM)[None, :]
    packed_rows = (first_row + query_rows).to(tl.int64)
    q_at = packed_rows[:, None] * q_row_stride + query_heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=live, other=0.0)
    positions = first_position + query_rows

    best = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    gathered = tl.zeros([TILE_QUERIES, HEAD_PAD], tl.float32)
    context_tokens = first_position + rows
    for start in range(0, context_tokens, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        present = tokens < context_tokens
        blocks = tl.load(tables_ptr + table * table_width + tokens // BLOCK_TOKENS, mask=present, other=0)
        k_rows = blocks.to(tl.int64) * (2 * BLOCK_TOKENS) + tokens % BLOCK_TOKENS
        k_at = (k_rows[:, None] * KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
        readable = present[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(kv_ptr + k_at, mask=readable, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E)
        visible = tokens[None, :] <= positions[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        # Rows past the tile's end see the context too, so that no row is ever all -inf.
        new_best = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        v = tl.load(kv_ptr + k_at + BLOCK_TOKENS * KV_HEADS * HEAD_DIM, mask=readable, other=0.0)
        gathered = gathered * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        best = new_best

    result = gathered / total[:, None]
    out_at = (packed_rows[:, None] * KV_HEADS * GROUPS + query_heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=live)
