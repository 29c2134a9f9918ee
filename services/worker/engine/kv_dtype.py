"""The number format of the KV cache, if it is not the model's: float8 (E4M3), with a scale of 1, or with scales of the
checkpoint.

Values are rounded to the nearest when they are written, those beyond 448 to 448, and multiplied in the model's dtype
when they are read. Attention always sees rounded values, also those of the tokens that a step computes: otherwise a
token would depend on how its prompt was cut into chunks.
"""

import re
from pathlib import Path

import torch
from safetensors import safe_open

from ballast.common.errors import ConfigError
from services.worker.engine.checkpoint import tensor_places

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
FP8 = torch.float8_e4m3fn
_LARGEST = 448.0
# Names of vLLM, AutoFP8 and compressed-tensors; the number is the layer's.
_SCALE = re.compile(r"\.(\d+)\.(?:.*\.)?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$")


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The format of `--kv-cache-dtype` for a model computed in `dtype`. Raises ConfigError if it is unknown."""
    if name not in KV_CACHE_DTYPES:
        raise ConfigError("kv_cache_dtype", f"{name!r} is not supported; use one of {', '.join(KV_CACHE_DTYPES)}")
    return dtype if name == "auto" else FP8


def kv_dtype_name(stored: torch.dtype, dtype: torch.dtype) -> str:
    """The name of a format for `--kv-cache-dtype`; empty: the model's own."""
    return "" if stored == dtype else "fp8_e4m3"


def checkpoint_scales(model_dir: Path) -> dict[int, tuple[float, float]]:
    """The scales of stored keys and values by layer, where the checkpoint has some. Where each head has its own, the
    largest is taken. Raises ConfigError if files are missing.
    """
    found: dict[int, dict[str, float]] = {}
    for name, path in tensor_places(model_dir).items():
        if (match := _SCALE.search(name)) is not None:
            with safe_open(path, framework="pt", device="cpu") as file:
                largest = float(file.get_tensor(name).float().max())
            if largest > 0:  # zero and less: not calibrated
                found.setdefault(int(match[1]), {})[match[2] or match[3]] = largest
    both = {layer: scales.get("kv", 1.0) for layer, scales in found.items()}
    return {layer: (scales.get("k", both[layer]), scales.get("v", both[layer])) for layer, scales in found.items()}


def converted(values: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    return values.clamp(-_LARGEST, _LARGEST).to(FP8) if stored == FP8 else values


def rounded(values: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """The values as read back from a cache of format `stored`."""
    return converted(values, stored).to(values.dtype)


def write_rows(cache_RX: torch.Tensor, rows_T: torch.Tensor, values_TX: torch.Tensor) -> None:
    """Write values to rows of a cache viewed as [rows, elements of a row]."""
    values_TX = converted(values_TX, cache_RX.dtype)
    if cache_RX.dtype == FP8:  # which torch does not copy by index
        cache_RX, values_TX = cache_RX.view(torch.uint8), values_TX.view(torch.uint8)
    cache_RX.index_copy_(0, rows_T, values_TX)
