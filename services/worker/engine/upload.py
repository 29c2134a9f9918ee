"""What a step's arrays become on the device that computes it."""

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT_BYTES = 16


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the same shapes and types. On the CPU they are the arrays' own memory; elsewhere all go in one copy,
    for which nobody waits: a stage is told of its next batch while it still executes the one before.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    return tensors if device.type == "cpu" else copy_at_once(tensors, device)


def copy_at_once(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    # torch keeps pinned memory that was copied from until the copy is over.
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, tensor in zip(starts, tensors, strict=True):
        staged[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    there = staged.to(device, non_blocking=True)
    return [
        there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
