# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""The Triton kernels of `GpuSampler`. Importing this module needs triton, so import it lazily.

One program per row. All filters are thresholds on the distance of a logit from the row's best: a non-negative float32,
whose bits sort like its value. Sums over a vocabulary have float32 terms added in float64; draws from few tokens are
computed in float64 throughout.

Shapes: R rows, V vocabulary.
"""

import triton
import triton.language as tl

IMPOSSIBLE = tl.constexpr(0x7F800000)  # the bits of an infinite distance
ABSENT = tl.constexpr(0x7FFFFFFF)  # past the end of the vocabulary
PIVOTS = tl.constexpr(4)

# Columns of a row's float parameters.
TEMPERATURE = tl.constexpr(0)  # 0: greedy
TOP_P = tl.constexpr(1)
FLOOR = tl.constexpr(2)  # largest distance that min-p admits
UNIFORM = tl.constexpr(3)
REPETITION = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
PRESENCE = tl.constexpr(6)
NUMBERS = tl.constexpr(8)

# Columns of a row's integer parameters.
TOP_K = tl.constexpr(0)  # 0: all
HISTORY = tl.constexpr(1)  # row of the token counts; -1: none
MASK = tl.constexpr(2)  # row of the bit masks; -1: none
WHOLES = tl.constexpr(4)

# Columns of the results of `find_best`.
BEST_TOKEN = tl.constexpr(0)
FOUND = tl.constexpr(1)  # number of tokens collected; -1: none, or more than fit
LIMIT = tl.constexpr(2)  # bits of the distance up to which tokens are collected
SEEN = tl.constexpr(4)


@triton.jit
def _logits(logits_ptr, at, vocabulary):
    """Loads logits as float32, with NaN and tokens past the vocabulary as minus infinity."""
    logits = tl.load(logits_ptr + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def _distances(logits_ptr, at, vocabulary, best):
    logits = _logits(logits_ptr, at, vocabulary)
    return tl.where(at < vocabulary, tl.where(logits == best, 0.0, best - logits), float("inf"))


@triton.jit
def _bits(distances, present):
    return tl.where(present, distances.to(tl.int32, bitcast=True), ABSENT)


@triton.jit
def find_best(
    logits_ptr,  # [R, V], rows row_stride apart
    numbers_ptr,  # [R, NUMBERS] float64
    wholes_ptr,  # [R, WHOLES] int32
    chosen_ptr,  # [R] int32: the best token
    best_ptr,  # [R] float32: the best token's logit
    seen_ptr,  # [R, SEEN] int32
    total_ptr,  # [R] float64: mass of all tokens that min-p admits, relative to the best token's
    near_ptr,  # [R, ROOM] float32: distances of collected tokens, in vocabulary order
    near_tokens_ptr,  # [R, ROOM] int32
    row_stride,
    vocabulary,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,  # minimum number of candidates collected for a filtered row, if the vocabulary has as many
    ROOM: tl.constexpr,
):
    """Argmax of each row and, for filtered rows, candidates among the best tokens."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * row_stride
    lanes = tl.arange(0, TILE)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    tokens = lanes
    for start in tl.range(0, vocabulary, TILE, num_stages=3):
        at = start + lanes
        logits = _logits(logits_ptr, at, vocabulary)
        tokens = tl.where(logits > highest, at, tokens)
        highest = tl.maximum(highest, logits)
    best = tl.max(highest, 0)
    token = tl.min(tl.where(highest == best, tokens, vocabulary), 0)  # ties: lowest token
    tl.store(chosen_ptr + row, token)
    tl.store(best_ptr + row, best)
    temperature = tl.load(numbers_ptr + row * NUMBERS + TEMPERATURE)
    floor = tl.load(numbers_ptr + row * NUMBERS + FLOOR).to(tl.float32)
    top_p = tl.load(numbers_ptr + row * NUMBERS + TOP_P)
    top_k = tl.load(wholes_ptr + row * WHOLES + TOP_K)
    found = -1
    limit = 0
    if (temperature > 0) & ((floor < float("inf")) | (top_p < 1) | ((top_k > 0) & (top_k < vocabulary))):
        # The distance (the upper half of its bits) within which at least LEAST lanes have a token. Tokens at the
        # limit itself may be most of the vocabulary and are excluded.
        near = _bits(tl.where(highest == best, 0.0, best - highest), lanes < vocabulary) // 65536
        low = 0
        high = IMPOSSIBLE // 65536
        while low < high:
            middle = (low + high) // 2
            enough = tl.sum((near <= middle).to(tl.int32), 0) >= LEAST
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle + 1)
        limit = high * 65536 - 1
        scale = tl.minimum(1.0 / temperature, 1e30).to(tl.float32)
        masses = tl.zeros([TILE], tl.float32)
        found = 0
        for start in tl.range(0, vocabulary, TILE, num_stages=3):
            at = start + lanes
            distances = _distances(logits_ptr, at, vocabulary, best)
            masses += tl.where(distances <= floor, tl.exp(-distances * scale), 0.0)
            taken = _bits(distances, at < vocabulary) <= limit
            places = found + tl.cumsum(taken.to(tl.int32), 0) - 1
            fits = taken & (places < ROOM)
            tl.store(near_ptr + row * ROOM + places, distances, mask=fits)
            tl.store(near_tokens_ptr + row * ROOM + places, at, mask=fits)
            found += tl.sum(taken.to(tl.int32), 0)
        tl.store(total_ptr + row, tl.sum(masses.to(tl.float64), 0))
        if found > ROOM:
            found = -1
    tl.store(seen_ptr + row * SEEN + FOUND, found)
    tl.store(seen_ptr + row * SEEN + LIMIT, limit)


@triton.jit
def _mass(logits_ptr, vocabulary, best, scale, last, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Mass (with COUNTS: number) of the tokens whose distance has at most the bits `last`, and the largest bits among
    them.
    """
    lanes = tl.arange(0, TILE)
    masses = tl.zeros([TILE], tl.float32)
    most = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, vocabulary, TILE, num_stages=3):
        at = start + lanes
        distances = _distances(logits_ptr, at, vocabulary, best)
        bits = _bits(distances, at < vocabulary)
        kept = (bits <= last) & (bits < IMPOSSIBLE)
        masses += tl.where(kept, 1.0 if COUNTS else tl.exp(-distances * scale), 0.0)
        most = tl.maximum(most, tl.where(kept, bits, 0))
    return tl.sum(masses.to(tl.float64), 0), tl.max(most, 0)


@triton.jit
def _border(logits_ptr, vocabulary, best, scale, high, target, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """The smallest bits at which the tokens' mass (with COUNTS: number) reaches the target. The mass at `high` must
    reach it.
    """
    low = 0
    lanes = tl.arange(0, TILE)
    steps = tl.arange(0, PIVOTS)
    while low < high:
        # Evenly spaced pivots, narrowed to distances that occur.
        nearest = low.to(tl.float32, bitcast=True)
        span = high.to(tl.float32, bitcast=True) - nearest
        pivots = tl.maximum((nearest + span * (steps / PIVOTS)).to(tl.int32, bitcast=True), low)
        pivots = tl.minimum(pivots, high - 1)
        reached = tl.zeros([PIVOTS, TILE], tl.float32)
        least = tl.full([TILE], ABSENT, tl.int32)
        for start in tl.range(0, vocabulary, TILE, num_stages=2):
            at = start + lanes
            distances = _distances(logits_ptr, at, vocabulary, best)
            bits = _bits(distances, at < vocabulary)
            masses = (at < vocabulary).to(tl.float32) if COUNTS else tl.exp(-distances * scale)
            reached += tl.where(bits[None, :] <= pivots[:, None], masses[None, :], 0.0)
            least = tl.minimum(least, tl.where(bits >= low, bits, ABSENT))
        enough = tl.sum(reached.to(tl.float64), 1) >= target
        low = tl.maximum(tl.max(tl.where(enough, low, pivots + 1), 0), tl.min(least, 0))
        high = tl.min(tl.where(enough, pivots, high), 0)
        low = tl.minimum(low, high)
    return high


@triton.jit
def _drawn(logits_ptr, vocabulary, best, scale, last, uniform, token, TILE: tl.constexpr):
    """The token drawn: of those with at most the bits `last`, the first in vocabulary order at which the cumulative
    mass exceeds `uniform` times the total.
    """
    lanes = tl.arange(0, TILE)
    total = tl.full((), 0.0, tl.float64)
    for start in tl.range(0, vocabulary, TILE, num_stages=3):
        at = start + lanes
        distances = _distances(logits_ptr, at, vocabulary, best)
        kept = _bits(distances, at < vocabulary) <= last
        total += tl.sum(tl.where(kept, tl.exp(-distances * scale), 0.0).to(tl.float64), 0)
    target = uniform * total
    passed = tl.full((), 0.0, tl.float64)
    start = 0
    searching = 1
    while (searching > 0) & (start < vocabulary):
        at = start + lanes
        distances = _distances(logits_ptr, at, vocabulary, best)
        kept = _bits(distances, at < vocabulary) <= last
        masses = tl.where(kept, tl.exp(-distances * scale), 0.0).to(tl.float64)
        reached = passed + tl.sum(masses, 0)
        if reached > target:
            beyond = (passed + tl.cumsum(masses, 0) > target) & (masses > 0)
            first = tl.min(tl.where(beyond, at, vocabulary), 0)
            # If rounding makes the sums differ, take the last token of the tile.
            token = tl.where(first < vocabulary, first, tl.max(tl.where(masses > 0, at, 0), 0))
            searching = 0
        passed = reached
        start += TILE
    return token


@triton.jit
def draw(
    logits_ptr,  # this and the following as in `find_best`, except for `chosen_ptr`
    numbers_ptr,
    wholes_ptr,
    chosen_ptr,  # [R] int32: the token drawn, unless the temperature is 0
    best_ptr,
    seen_ptr,
    total_ptr,
    near_ptr,
    near_tokens_ptr,
    row_stride,
    vocabulary,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * row_stride
    temperature = tl.load(numbers_ptr + row * NUMBERS + TEMPERATURE)
    if temperature > 0:
        best = tl.load(best_ptr + row)
        token = tl.load(chosen_ptr + row)
        top_p = tl.load(numbers_ptr + row * NUMBERS + TOP_P)
        floor = tl.load(numbers_ptr + row * NUMBERS + FLOOR).to(tl.float32)
        uniform = tl.load(numbers_ptr + row * NUMBERS + UNIFORM)
        top_k = tl.load(wholes_ptr + row * WHOLES + TOP_K)
        found = tl.load(seen_ptr + row * SEEN + FOUND)
        limit = tl.load(seen_ptr + row * SEEN + LIMIT)
        whole = limit == IMPOSSIBLE - 1  # all possible tokens were collected
        has_top_k = (top_k > 0) & (top_k < vocabulary)
        last = floor.to(tl.int32, bitcast=True)
        done = 0
        if (found >= 0) & ((top_k <= found) | whole | (has_top_k == 0)):
            places = tl.arange(0, ROOM)
            present = places < found
            distances = tl.load(near_ptr + row * ROOM + places, mask=present, other=float("inf"))
            tokens = tl.load(near_tokens_ptr + row * ROOM + places, mask=present, other=0)
            bits = _bits(distances, present)
            if has_top_k & (top_k <= found):
                low = 0
                high = limit
                while low < high:
                    middle = low + (high - low) // 2
                    enough = tl.sum((bits <= middle).to(tl.int32), 0) >= top_k
                    high = tl.where(enough, middle, high)
                    low = tl.where(enough, low, middle + 1)
                last = tl.minimum(last, high)
            masses = tl.where(bits <= last, tl.exp(-distances.to(tl.float64) / temperature), 0.0)
            mass = tl.sum(masses, 0)
            all_there = whole | (last <= limit)
            total = tl.where(all_there, mass, tl.load(total_ptr + row))
            if all_there | ((top_p < 1) & (mass >= top_p * total)):
                if top_p < 1:
                    low = 0
                    high = tl.minimum(last, limit)
                    while low < high:
                        middle = low + (high - low) // 2
                        enough = tl.sum(tl.where(bits <= middle, masses, 0.0), 0) >= top_p * total
                        high = tl.where(enough, middle, high)
                        low = tl.where(enough, low, middle + 1)
                    masses = tl.where(bits <= high, masses, 0.0)
                reached = tl.cumsum(masses, 0)
                beyond = (reached > uniform * tl.max(reached, 0)) & (masses > 0)
                place = tl.min(tl.where(beyond, places, ROOM), 0)
                token = tl.where(place < ROOM, tl.sum(tl.where(places == place, tokens, 0), 0), token)
                done = 1
        if done == 0:
            scale = tl.minimum(1.0 / temperature, 1e30).to(tl.float32)
            if has_top_k:
                number, most = _mass(logits_ptr, vocabulary, best, scale, IMPOSSIBLE, True, TILE)
                if number >= top_k:
                    high = _border(logits_ptr, vocabulary, best, scale, most, top_k.to(tl.float64), True, TILE)
                    last = tl.minimum(last, high)
            if top_p < 1:
                mass, most = _mass(logits_ptr, vocabulary, best, scale, last, False, TILE)
                last = _border(logits_ptr, vocabulary, best, scale, most, top_p * mass, False, TILE)
            token = _drawn(logits_ptr, vocabulary, best, scale, last, uniform, token, TILE)
        tl.store(chosen_ptr + row, token)


# Triton must not specialise on `count`: a new value could cost a compilation in the middle of a step.
@triton.jit(do_not_specialize=["count"])
def edit(
    logits_ptr,  # [R, V], rows row_stride apart
    places_ptr,  # [N, 2] int32: row and token, each pair once
    values_ptr,  # [N] float32
    row_stride,
    count,
    TILE: tl.constexpr,
):
    """Add a value, logit bias or minus infinity, to individual logits."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    present = at < count
    rows = tl.load(places_ptr + at * 2, mask=present, other=0).to(tl.int64)
    tokens = tl.load(places_ptr + at * 2 + 1, mask=present, other=0)
    values = tl.load(values_ptr + at, mask=present, other=0.0)
    logits = tl.load(logits_ptr + rows * row_stride + tokens, mask=present, other=0.0)
    tl.store(logits_ptr + rows * row_stride + tokens, (logits.to(tl.float32) + values).to(logits.dtype), mask=present)


@triton.jit(do_not_specialize=["mask_stride"])
def adjust(
    logits_ptr,  # [R, V], rows row_stride apart
    numbers_ptr,
    wholes_ptr,
    masks_ptr,  # [M, mask_stride] int32: a bit for each allowed token
    counts_ptr,  # [H, V] int16: 0 for an unseen token; otherwise 1 plus its count in the output
    row_stride,
    mask_stride,
    vocabulary,
    TILE: tl.constexpr,
):
    """Apply token masks and penalties. One program per tile of a row."""
    row = tl.program_id(0)
    history = tl.load(wholes_ptr + row * WHOLES + HISTORY).to(tl.int64)
    mask = tl.load(wholes_ptr + row * WHOLES + MASK).to(tl.int64)
    if (history >= 0) | (mask >= 0):
        at = tl.program_id(1) * TILE + tl.arange(0, TILE)
        present = at < vocabulary
        logits_ptr += row.to(tl.int64) * row_stride
        stored = tl.load(logits_ptr + at, mask=present, other=0.0)
        logits = stored.to(tl.float32)
        if mask >= 0:
            words = tl.load(masks_ptr + mask * mask_stride + at // 32, mask=present, other=0)
            logits = tl.where((words >> (at % 32)) & 1 != 0, logits, float("-inf"))
        if history >= 0:
            repetition = tl.load(numbers_ptr + row * NUMBERS + REPETITION).to(tl.float32)
            frequency = tl.load(numbers_ptr + row * NUMBERS + FREQUENCY).to(tl.float32)
            presence = tl.load(numbers_ptr + row * NUMBERS + PRESENCE).to(tl.float32)
            counts = tl.load(counts_ptr + history * vocabulary + at, mask=present, other=0).to(tl.int32)
            repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
            logits = tl.where(counts > 0, repeated, logits)
            logits -= tl.where(counts > 1, (counts - 1).to(tl.float32) * frequency + presence, 0.0)
        tl.store(logits_ptr + at, logits.to(stored.dtype), mask=present)


@triton.jit
def take_in(
    wholes_ptr,
    chosen_ptr,  # [R] int32
    counts_ptr,
    vocabulary,
):
    """Count the chosen tokens of penalised rows. One program per row."""
    row = tl.program_id(0)
    history = tl.load(wholes_ptr + row * WHOLES + HISTORY).to(tl.int64)
    if history >= 0:
        at = counts_ptr + history * vocabulary + tl.load(chosen_ptr + row)
        so_far = tl.load(at).to(tl.int32)
        tl.store(at, tl.minimum(tl.maximum(so_far, 1) + 1, 32767).to(tl.int16))
