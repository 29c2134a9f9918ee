# pyright: basic, reportMissingImports=false
"""The Triton kernel behind `runs`. Importing this module needs triton; nothing else may import it eagerly."""

import triton
import triton.language as tl


@triton.jit
def copy_runs(
    parts_ptr,  # [P, 3] int64: address, place in the slot, size; in units of 16 bytes, or of one
    slot_ptr,  # int32, or int8 unless WIDE
    GATHERS: tl.constexpr,  # into the slot; else out of it
    SIZE: tl.constexpr,  # elements of a part at most
    WIDE: tl.constexpr,
):
    """Copies between memory at any address and a slot. A program is a part."""
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
