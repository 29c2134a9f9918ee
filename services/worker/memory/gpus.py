"""The GPUs found by torch."""

import re

import torch

from ballast.common.errors import ConfigError

_CUDA = re.compile(r"cuda(?::(\d+))?")


def gpu_uuids() -> list[str]:
    """UUIDs of all GPUs, by ordinal. The first call is slow."""
    return [_uuid(index) for index in range(torch.cuda.device_count())]


def gpu_index(device: str) -> int | None:
    """Return the ordinal in cuda, cuda:0, cuda:1 ...; None: not a GPU.

    Raises:
        ConfigError: `device` is not a device name.
    """
    if device == "cpu":
        return None
    found = _CUDA.fullmatch(device)
    if found is None:
        raise ConfigError("device", f"{device!r} is not supported; use cpu, cuda or cuda:N")
    return int(found[1] or 0)


def gpu_bytes(device: str) -> int | None:
    """Return the GPU's total memory; None for a CPU, or if there is no such GPU (opening the memory reports that)."""
    index = gpu_index(device)
    if index is None or index >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_properties(index).total_memory


def describe(device: torch.device) -> str:
    """Return the name of a device for the log: `cpu`, or the ordinal and UUID of a GPU."""
    return device.type if device.type != "cuda" else f"{device} {_uuid(device.index)}"


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
