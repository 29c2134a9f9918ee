"""Writes numpy arrays to safetensors files, and reads the headers of such files.

A file has eight bytes of header length, a JSON header (name -> dtype, shape, byte range) and the raw data. The package
`safetensors` is not used, because its numpy interface lacks bfloat16 and only workers depend on it.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ballast.common.errors import ConfigError

# Name in config.json -> (name in a safetensors header, bytes per element).
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
}
DTYPE_NAMES = {code: name for name, (code, _) in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's limit
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorHeader:
    dtype: str  # as in the header: F32, BF16 ...
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def element_count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[np.floating[Any]]], dtype: str) -> int:
    """Write float arrays of any numpy dtype, rounded to `dtype` (a key of DTYPES). Returns the size of the data."""
    code, element_bytes = DTYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.size * element_bytes
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for array in tensors.values():
            file.write(_rounded(array, dtype).tobytes())
    return offset


def _rounded(array: NDArray[np.floating[Any]], dtype: str) -> NDArray[Any]:  # numpy has no bfloat16: uint16 instead
    if dtype != "bfloat16":
        return array.astype(np.dtype(dtype).newbyteorder("<"))
    bits = array.astype("<f4").view("<u4")
    to_even = ((bits >> 16) & 1) + 0x7FFF
    return ((bits + to_even) >> 16).astype("<u2")


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Read the header of a safetensors file: tensor name -> dtype, shape and size.

    Raises:
        ConfigError: the file cannot be read, is truncated or is not in the safetensors format.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ConfigError(str(path), "not a safetensors file: its header length makes no sense")
            raw = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"its safetensors header is damaged: {error}") from error
    tensors = _parse(path, raw)
    for name, tensor in tensors.items():
        if tensor.size_bytes < 0 or min(tensor.shape, default=0) < 0:
            raise ConfigError(str(path), f"its safetensors header is damaged: {name[:100]} has a negative size")
    expected_bytes = 8 + length + sum(t.size_bytes for t in tensors.values())
    if path.stat().st_size < expected_bytes:
        raise ConfigError(str(path), f"cut off: {path.stat().st_size} bytes of {expected_bytes}; download it again")
    return tensors


def _parse(path: Path, raw: object) -> dict[str, TensorHeader]:
    try:
        entries = cast("dict[str, dict[str, Any]]", raw)  # raises when used if the structure differs
        return {
            name: TensorHeader(
                str(entry["dtype"]),
                tuple(int(size) for size in entry["shape"]),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(str(path), f"its safetensors header is damaged: {error!r}") from error
