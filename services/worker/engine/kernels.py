"""Bounds what oneDNN keeps of the matrix products that it has compiled.

It compiles a product for each number of rows and keeps it: 0.6 MiB whatever the sizes, most of it two descriptors of
260 KB. Its cache has 1024 entries, of which a product takes two, and torch keeps up to 1024 descriptors more in front
of it. Since a batch may have any number of rows, a worker would grow by some 580 MiB until both are full. Compiling
takes 0.5 to 1.3 ms. So the caches are smaller here, and batches are padded to fewer different numbers of rows.
"""

import os
from collections.abc import MutableMapping

# Products kept: about 75 MiB. A model has five shapes of them, which leaves 25 numbers of rows.
_PRODUCTS = 128
_ENTRIES_PER_PRODUCT = 2
_DESCRIPTORS = 64  # in front of it; what is missing there is found in oneDNN's cache nearly as fast
_EXACT_ROWS = 32
_STEPS_PER_OCTAVE = 16


def bound_kernel_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bounds this process's caches; no effect once a product has been computed. What the operator has set stays."""
    if not {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"} & environ.keys():
        environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(_PRODUCTS * _ENTRIES_PER_PRODUCT)
    environ.setdefault("LRU_CACHE_CAPACITY", str(_DESCRIPTORS))


def padded_rows(rows: int) -> int:
    """The number of rows to compute instead: at most a sixteenth more, and only 16 values between n and 2n."""
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _STEPS_PER_OCTAVE)
    return -(-rows // step) * step
