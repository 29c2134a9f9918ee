# pyright: basic, reportMissingImports=false
"""The Triton kernels of `runs` and `mixing`. Import this module lazily, because it needs triton."""

import triton
import triton.language as tl


@triton.jit
def copy_runs(
    parts_ptr,  # [P, 3] int64: address, offset in the slot, size; in units of 16 bytes or of one byte
    slot_ptr,  # int32, or int8 unless WIDE
    GATHERS: tl.constexpr,  # copy into the slot; otherwise out of it
    SIZE: tl.constexpr,  # maximum elements of a part
    WIDE: tl.constexpr,
):
    """Copy between scattered memory and a slot. One program per part."""
    part_ptr = parts_ptr + 3 * tl.program_id(0)
    address, place, size = tl.load(part_ptr), tl.load(part_ptr + 1), tl.load(part_ptr + 2).to(tl.int32)
    lanes = tl.arange(0, SIZE)
    if WIDE:
        there = tl.multiple_of((address * 16).to(tl.pointer_type(tl.int32)), 16) + lanes
        here = slot_ptr + place * 4 + lanes
        inside = lanes < size * 4
    else:
        there = address.to(tl.pointer_type(tl.int8)) + lanes
        here = slot_ptr + place + lanes
        inside = lanes < size
    if GATHERS:
        tl.store(here, tl.load(there, mask=inside), mask=inside)
    else:
        tl.store(there, tl.load(here, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count"])
def mix_words(
    sums_ptr,  # [2] uint64, zeros
    words_ptr,  # [N] uint64
    count,  # N
    ADDED: tl.constexpr,  # added to a word's index, see `mixing`
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    SIZE: tl.constexpr,  # words per iteration
    ROUNDS: tl.constexpr,
):
    """Add the terms of all words to two sums, modulo 2**64, in any order. A program handles `SIZE * ROUNDS` words."""
    begin = tl.program_id(0).to(tl.int64) * (SIZE * ROUNDS)
    low = tl.zeros((SIZE,), tl.uint64)
    high = tl.zeros((SIZE,), tl.uint64)
    for nth in range(ROUNDS):
        at = begin + nth * SIZE + tl.arange(0, SIZE)
        inside = at < count
        term = tl.load(words_ptr + at, mask=inside, other=0) * FIRST + (at + 1).to(tl.uint64) * ADDED
        term = (term ^ (term >> 32)) * SECOND
        low += tl.where(inside, term, 0)
        high += tl.where(inside, (term ^ (term >> 29)) * THIRD, 0)
    tl.atomic_add(sums_ptr, tl.sum(low, 0))
    tl.atomic_add(sums_ptr + 1, tl.sum(high, 0))
