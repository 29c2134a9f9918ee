import numpy as np
import torch

from services.worker.engine.upload import copy_at_once, upload


def test_arrays_keep_shapes_types_and_contents() -> None:
    arrays = [np.arange(5), np.arange(6, dtype=np.int32).reshape(2, 3), np.empty(0, np.int64), np.arange(3.0)]
    device = torch.device("cpu")
    copied = copy_at_once([torch.from_numpy(array) for array in arrays], device)
    for array, there, same in zip(arrays, copied, upload(arrays, device), strict=True):
        assert there.numpy().dtype == array.dtype
        np.testing.assert_array_equal(there.numpy(), array)
        assert same.data_ptr() == torch.from_numpy(array).data_ptr()
