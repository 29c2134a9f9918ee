"""Memory that the host must not access, like a GPU's: an access fails with EFAULT or crashes.

Its pages are mapped twice: tensors "on the device" use the mapping without access rights, and copies, which the driver
makes on a GPU, use the other mapping.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

DEVICE = torch.device("privateuseone", 0)

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

_DEVICE_OF = cast(Any, torch.Tensor.device).__get__
_away: dict[int, tuple[int, int]] = {}  # inaccessible address -> (bytes, accessible address)


class Untouchable(torch.Tensor):
    """A tensor that supports only metadata and copies: any other access fails."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func == _DEVICE_OF:
            return DEVICE
        if name == "copy_":
            into, source = args[:2]
            touchable(into).copy_(touchable(source))
            return into
        if name == "to":
            device = torch.device(args[1])
            return args[0] if device == DEVICE else touchable(args[0]).to(device, copy=True)
        return super().__torch_function__(func, types, args, kwargs)


def touchable(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor that the test can access."""
    if not isinstance(tensor, Untouchable):
        return tensor
    address = tensor.data_ptr()
    for start, (size_bytes, other) in list(_away.items()):  # another thread may add entries
        if start <= address < start + size_bytes:
            plain = _over(other + address - start, tensor.numel() * tensor.element_size())
            return plain.view(tensor.dtype).view(tensor.shape)
    raise AssertionError("not memory of the fake device")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in inaccessible memory, which is never freed."""
    size_bytes = max(tensor.nbytes, 1) + -max(tensor.nbytes, 1) % mmap.PAGESIZE
    file = os.memfd_create("device")
    os.ftruncate(file, size_bytes)
    rights = (0, mmap.PROT_READ | mmap.PROT_WRITE)
    away, near = (cast(int, _LIBC.mmap(None, size_bytes, right, mmap.MAP_SHARED, file, 0)) for right in rights)
    os.close(file)
    _away[away] = (size_bytes, near)
    there = _over(away, tensor.nbytes).view(tensor.dtype).view(tensor.shape).as_subclass(Untouchable)
    return there.copy_(tensor)


def _over(address: int, size_bytes: int) -> torch.Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)
