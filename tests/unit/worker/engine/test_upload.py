from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.engine.upload import copy_at_once, upload


def test_arrays_keep_shapes_types_and_contents() -> None:
    arrays = [np.arange(5), np.arange(6, dtype=np.int32).reshape(2, 3), np.empty(0, np.int64), np.arange(3.0)]
    device = torch.device("cpu")
    copied = copy_at_once([torch.from_numpy(array) for array in arrays], device)
    for array, there, same in zip(arrays, copied, upload(arrays, device), strict=True):
        assert there.numpy().dtype == array.dtype
        np.testing.assert_array_equal(there.numpy(), array)
        assert same.data_ptr() == torch.from_numpy(array).data_ptr()


class Copies(TorchDispatchMode):
    """Records, for every copy to the meta device, whether the caller waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if out.is_meta and not func.is_view and not args[0].is_meta:
            self.waited_for.append(not (kwargs or {}).get("non_blocking"))
        return out


def test_arrays_are_uploaded_in_one_asynchronous_copy() -> None:
    with Copies() as copies:
        there = upload([np.arange(5), np.arange(6, dtype=np.int32).reshape(2, 3)], torch.device("meta"))
    assert [(tuple(each.shape), each.dtype) for each in there] == [((5,), torch.int64), ((2, 3), torch.int32)]
    assert copies.waited_for == [False]
