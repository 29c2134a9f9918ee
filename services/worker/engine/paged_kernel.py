# pyright: basic, reportMissingImports=false
"""The Triton kernel of `CudaAttention`. Importing this module needs triton, so import it lazily.

A tile is a few consecutive rows of one sequence, for all query heads that share a KV head. Decodes are tiles of one
row; a long context is split over several, and a second kernel joins the partial results. There may be fewer programs
than decode tiles: the number of tiles is read from memory, so that one CUDA graph fits all contexts. K and V are read
in place through the sequence's block table, relative to a mapped block, because Triton looks up every pointer argument
in the driver, and the start of the layer's range may be unmapped.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def from_kv(stored, kind: tl.constexpr):
    """Convert stored KV to the dtype `kind`. Bytes hold float8 (E4M3), for GPUs without that type."""
    if stored.dtype == tl.uint8:
        wide = stored.to(tl.uint16)
        half = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)  # float16 has a bias of 15 instead of 7
        return (half.to(tl.float16, bitcast=True) * 256.0).to(kind)
    return stored.to(kind)


@triton.jit
def to_kv(values, kind: tl.constexpr):
    """Convert values to the KV dtype `kind`. float8 saturates at 448."""
    if kind == tl.uint8:
        wide = values.to(tl.float32)
        sign = (wide.to(tl.uint32, bitcast=True) >> 24) & 0x80
        size = tl.minimum(tl.abs(wide), 448.0)
        bits = size.to(tl.uint32, bitcast=True)
        small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # in steps of 2^-9
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        return (sign | tl.where(size < 0.015625, small, normal)).to(tl.uint8)
    if kind == tl.float8e4nv:
        return tl.minimum(tl.maximum(values.to(tl.float32), -448.0), 448.0).to(kind)
    return values.to(kind)


@triton.jit(do_not_specialize=["base_block"])
def paged_attention(
    out_ptr,  # [T, N, H], contiguous
    q_ptr,  # [T, N, H], rows q_row_stride apart
    kv_ptr,  # [B, 2, BLOCK_TOKENS, K, H] from base_block on, contiguous
    shape_ptr,  # [3] int32: tiles, if possibly more than programs; blocks per table; offset of the tables
    tables_ptr,  # [S, blocks per table] int32, at the offset given by shape_ptr
    tiles_ptr,  # [tiles, 8] int32: table, first row, rows, position of the first row, context from, to, part or -1
    parts_ptr,  # [parts, N, H] float32: partial results
    weights_ptr,  # [parts, N] float32: log2 of the parts' weights
    q_row_stride,
    scale,
    base_block,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,  # next power of two
    BLOCK_TOKENS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,  # rows x GROUPS, padded
    TILE_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,  # True: tiles are decodes, whose contexts may be split
    UNMASKED: tl.constexpr,  # True: a separate loop, without masks, for the tokens that every row of a tile sees
    PRECISION: tl.constexpr,
):
    """Attention of tiles. One program per KV head and tile; with SPLITS a program loops over several tiles."""
    table_width = tl.load(shape_ptr + 1)
    tables_ptr += tl.load(shape_ptr + 2)
    if SPLITS:
        for tile in range(tl.program_id(0), tl.load(shape_ptr), tl.num_programs(0)):
            _attend(
                tile, out_ptr, q_ptr, kv_ptr, tables_ptr, tiles_ptr, parts_ptr, weights_ptr, q_row_stride,
                table_width, scale, base_block, KV_HEADS, GROUPS, HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, TILE_QUERIES,
                TILE_TOKENS, SPLITS, UNMASKED, PRECISION,
            )  # fmt: skip
    else:
        _attend(
            tl.program_id(0), out_ptr, q_ptr, kv_ptr, tables_ptr, tiles_ptr, parts_ptr, weights_ptr, q_row_stride,
            table_width, scale, base_block, KV_HEADS, GROUPS, HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, TILE_QUERIES,
            TILE_TOKENS, SPLITS, UNMASKED, PRECISION,
        )  # fmt: skip


@triton.jit
def _attend(
    tile,
    out_ptr,
    q_ptr,
    kv_ptr,
    tables_ptr,
    tiles_ptr,
    parts_ptr,
    weights_ptr,
    q_row_stride,
    table_width,
    scale,
    base_block,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    UNMASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(1)
    table = tl.load(tiles_ptr + tile * 8)
    first_row = tl.load(tiles_ptr + tile * 8 + 1)
    rows = tl.load(tiles_ptr + tile * 8 + 2)
    first_position = tl.load(tiles_ptr + tile * 8 + 3)
    context_from = 0
    context_to = first_position + rows
    if SPLITS:
        context_from = tl.load(tiles_ptr + tile * 8 + 4)
        context_to = tl.load(tiles_ptr + tile * 8 + 5)

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
    whole_to = context_from
    if UNMASKED:
        # Every row sees every token up to the first row's position.
        whole_to = (first_position + 1) // TILE_TOKENS * TILE_TOKENS
        for start in range(0, whole_to, TILE_TOKENS):
            best, total, gathered = _take(
                start, context_to, q, positions, best, total, gathered, kv_ptr, tables_ptr + table * table_width,
                kv_head, dims, scale * LOG2_E, base_block, KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, TILE_TOKENS,
                PRECISION, False,
            )  # fmt: skip
    for start in range(whole_to, context_to, TILE_TOKENS):
        best, total, gathered = _take(
            start, context_to, q, positions, best, total, gathered, kv_ptr, tables_ptr + table * table_width, kv_head,
            dims, scale * LOG2_E, base_block, KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, TILE_TOKENS, PRECISION, True,
        )  # fmt: skip

    result = gathered / total[:, None]
    part = -1
    if SPLITS:
        part = tl.load(tiles_ptr + tile * 8 + 6)
    if part < 0:
        out_at = (packed_rows[:, None] * KV_HEADS * GROUPS + query_heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=live)
    else:
        heads_at = part.to(tl.int64) * KV_HEADS * GROUPS + query_heads
        tl.store(parts_ptr + heads_at[:, None] * HEAD_DIM + dims[None, :], result, mask=live)
        tl.store(weights_ptr + heads_at, best + tl.log2(total), mask=query_rows < rows)


@triton.jit
def _take(
    start,
    context_to,
    q,
    positions,
    best,
    total,
    gathered,
    kv_ptr,
    table_ptr,
    kv_head,
    dims,
    scale,
    base_block,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every one of these tokens
):
    """Attend to some context tokens (online softmax). Returns updated maxima, sums of weights and unscaled outputs."""
    tokens = start + tl.arange(0, TILE_TOKENS)
    readable = (dims < HEAD_DIM)[None, :]
    if MASKED:
        present = tokens < context_to
        readable = present[:, None] & readable
        blocks = tl.load(table_ptr + tokens // BLOCK_TOKENS, mask=present, other=0)
    else:
        blocks = tl.load(table_ptr + tokens // BLOCK_TOKENS)
    k_rows = (blocks - base_block).to(tl.int64) * (2 * BLOCK_TOKENS) + tokens % BLOCK_TOKENS
    k_at = (k_rows[:, None] * KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
    v_at = k_at + BLOCK_TOKENS * KV_HEADS * HEAD_DIM
    is_whole: tl.constexpr = (not MASKED) and HEAD_DIM == HEAD_PAD  # pyright: ignore[reportAssignmentType]
    k = tl.load(kv_ptr + k_at) if is_whole else tl.load(kv_ptr + k_at, mask=readable, other=0.0)
    scores = tl.dot(q, tl.trans(from_kv(k, q.dtype)), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
    # Rows past the tile's end attend too, so that no row is ever all -inf.
    new_best = tl.maximum(best, tl.max(scores, 1) * scale)
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores * scale - new_best[:, None])
    v = tl.load(kv_ptr + v_at) if is_whole else tl.load(kv_ptr + v_at, mask=readable, other=0.0)
    v = from_kv(v, q.dtype)
    gathered = gathered * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_best, total * shrink + tl.sum(weights, 1), gathered


@triton.jit
def join_parts(
    out_ptr,  # [T, N, H], contiguous
    parts_ptr,
    weights_ptr,
    joins_ptr,  # [split rows, 4] int32: row, first part, number of parts (0: the entry is unused), unused
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    MOST_PARTS: tl.constexpr,
):
    """Combine the parts of a split context. One program per head of a row."""
    join = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(joins_ptr + join * 4).to(tl.int64)
    first = tl.load(joins_ptr + join * 4 + 1).to(tl.int64)
    count = tl.load(joins_ptr + join * 4 + 2)
    parts = tl.arange(0, MOST_PARTS)
    dims = tl.arange(0, HEAD_PAD)
    heads_at = (first + parts) * HEADS + head
    weights = tl.load(weights_ptr + heads_at, mask=parts < count, other=float("-inf"))
    weights = tl.exp2(weights - tl.max(weights, 0))
    readable = (parts < count)[:, None] & (dims < HEAD_DIM)[None, :]
    values = tl.load(parts_ptr + heads_at[:, None] * HEAD_DIM + dims[None, :], mask=readable, other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    out_at = (row * HEADS + head) * HEAD_DIM + dims
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=(dims < HEAD_DIM) & (count > 0))
