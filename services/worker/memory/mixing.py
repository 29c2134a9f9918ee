"""A checksum of parameters that a GPU computes at memory bandwidth, equal to the CPU's result.

128 bits: two sums, modulo 2**64, over terms that depend on each 8-byte word and its index. Detects wrong, missing and
misplaced bytes; not cryptographic.
"""

import importlib
import struct
from typing import Any

import numpy as np
import torch

from services.worker.memory.tensors import beside

_WORD = struct.Struct("<Q")
_SUMS = struct.Struct("<QQ")
_MASK = (1 << 64) - 1
_ADDED, _FIRST, _SECOND, _THIRD = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
    0x94D049BB133111EB,
    0xD6E8FEB86659FD93,
)
_AT_ONCE = 1 << 15  # words per iteration on the host, which fit into the processor's cache


def constants() -> dict[str, Any]:
    """Return the compile-time constants of the kernel."""
    return {"ADDED": _ADDED, "FIRST": _FIRST, "SECOND": _SECOND, "THIRD": _THIRD, "SIZE": 1024, "ROUNDS": 8}


def mixed(data: torch.Tensor) -> bytes:
    """Return a 16-byte checksum of aligned flat bytes. A GPU computes it on a side stream."""
    with beside(data.device)():
        return _mixed(data)


def _mixed(data: torch.Tensor) -> bytes:
    count = data.numel() // _WORD.size
    words = data[: count * _WORD.size].view(torch.int64)
    low, high = _sums_on_host(words) if data.device.type == "cpu" else _sums_on_device(words)
    if data.numel() % _WORD.size:
        (last,) = _WORD.unpack(bytes(data[count * _WORD.size :].tolist()).ljust(_WORD.size, b"\0"))
        term = (last * _FIRST + (count + 1) * _ADDED) & _MASK
        term = (term ^ term >> 32) * _SECOND & _MASK
        low, high = low + term, high + (term ^ term >> 29) * _THIRD
    return _SUMS.pack(low & _MASK, high & _MASK)


def _sums_on_device(words: torch.Tensor) -> tuple[int, int]:
    sums, count = torch.zeros(2, dtype=torch.int64, device=words.device), words.numel()
    if count:
        kernel: Any = importlib.import_module("services.worker.memory.kernels").mix_words
        fixed = constants()
        grid = (-(-count // (fixed["SIZE"] * fixed["ROUNDS"])),)
        kernel[grid](sums.view(torch.uint64), words.view(torch.uint64), count, **fixed)
    low, high = sums.tolist()
    return low, high


def _sums_on_host(words: torch.Tensor) -> tuple[int, int]:
    low = high = 0
    every = words.numpy().view(np.uint64)
    places = np.arange(1, _AT_ONCE + 1, dtype=np.uint64) * np.uint64(_ADDED)
    for begin in range(0, len(every), _AT_ONCE):
        some = every[begin : begin + _AT_ONCE]
        term = some * np.uint64(_FIRST)
        term += places[: len(some)]
        term += np.uint64(begin * _ADDED & _MASK)
        term ^= term >> np.uint64(32)
        term *= np.uint64(_SECOND)
        low += int(term.sum(dtype=np.uint64))
        term ^= term >> np.uint64(29)
        term *= np.uint64(_THIRD)
        high += int(term.sum(dtype=np.uint64))
    return low, high
