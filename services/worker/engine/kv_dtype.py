"""The KV cache's dtype if it differs from the model's: float8 (E4M3), with a scale of 1 or the checkpoint's scales.

Values are rounded to nearest when written, saturating at 448, and multiplied in the model's dtype when read. Attention
always sees rounded values, even for the tokens that the current step computes; otherwise a token would depend on how
its prompt was split into chunks.
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
# Tensor names used by vLLM, AutoFP8 and compressed-tensors; the number is the layer's index.
_SCALE = re.compile(r"\.(\d+)\.(?:.*\.)?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$")


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that `--kv-cache-dtype` selects for a model in `dtype`. Raises ConfigError if `name` is unknown."""
    if name not in KV_CACHE_DTYPES:
        raise ConfigError("kv_cache_dtype", f"{name!r} is not supported; use one of {', '.join(KV_CACHE_DTYPES)}")
    return dtype if name == "auto" else FP8


def kv_dtype_name(stored: torch.dtype, dtype: torch.dtype) -> str:
    """The name of `stored` for `--kv-cache-dtype`; empty if it is the model's `dtype`."""
    return "" if stored == dtype else "fp8_e4m3"


def checkpoint_scales(model_dir: Path) -> dict[int, tuple[float, float]]:
    """Layer -> (key scale, value scale), for the layers that have scales in the checkpoint. If each head has its own,
    the largest is used. Raises ConfigError if files are missing.
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
    if cache_RX.dtype == FP8:  # torch cannot copy float8 by index
        cache_RX, values_TX = cache_RX.view(torch.uint8), values_TX.view(torch.uint8)
    cache_RX.index_copy_(0, rows_T, values_TX)
