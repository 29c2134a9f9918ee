"""Uploads the arrays of a step to the device that computes it."""

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT_BYTES = 16


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors on `device` with the arrays' shapes and types. On a CPU they share the arrays' memory; otherwise all are
    transferred in one asynchronous copy, because a stage receives its next batch while it still executes the previous
    one.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    return tensors if device.type == "cpu" else copy_at_once(tensors, device)


def copy_at_once(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    # torch keeps pinned memory until the copy has completed.
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, tensor in zip(starts, tensors, strict=True):
        staged[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    there = staged.to(device, non_blocking=True)
    return [
        there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
