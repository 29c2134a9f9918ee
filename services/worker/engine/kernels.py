"""Bounds oneDNN's caches of compiled matrix products.

oneDNN compiles a product for each number of rows and caches it: 0.6 MiB each regardless of the sizes, most of it two
descriptors of 260 KB. Its cache has 1024 entries, two per product, and torch caches up to 1024 more descriptors. As
batches can have any number of rows, a worker would grow by some 580 MiB until both caches are full. Compiling takes 0.5
to 1.3 ms. Therefore the caches are made smaller, and batches are padded to fewer distinct numbers of rows.
"""

import os
from collections.abc import MutableMapping

# Cached products: about 75 MiB. A model has matrices of five shapes, so there is room for 25 numbers of rows.
_PRODUCTS = 128
_ENTRIES_PER_PRODUCT = 2
_DESCRIPTORS = 64  # torch's own cache; a miss is looked up in oneDNN's cache nearly as fast
_EXACT_ROWS = 32
_STEPS_PER_OCTAVE = 16


def bound_kernel_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bound this process's caches; no effect after the first product. Values set by the operator stay."""
    if not {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"} & environ.keys():
        environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(_PRODUCTS * _ENTRIES_PER_PRODUCT)
    environ.setdefault("LRU_CACHE_CAPACITY", str(_DESCRIPTORS))


def padded_rows(rows: int) -> int:
    """Number of rows that `rows` are padded to: at most a sixteenth more, with 16 distinct values between n and 2n."""
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _STEPS_PER_OCTAVE)
    return -(-rows // step) * step
