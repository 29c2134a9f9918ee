"""Multiplies float8 matrices on a GPU's float8 units, instead of dequantising the matrix each time.

Activations are quantised with one scale per row, so that a row does not depend on the others. Only for matrices with
one scale, or one per output, which `torch._scaled_mm` supports; matrices with block scales are dequantised.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from services.worker.engine.quantised import SCALES, VALUES, Number, Packing

_FP8, _LARGEST = torch.float8_e4m3fn, 448.0
_LEAST_CAPABILITY = (8, 9)
_MULTIPLE = 16  # of rows and columns of a matrix


@functools.cache
def device_multiplies(device: torch.device) -> bool:
    """True if this device has float8 units, and this torch can use them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY and succeeds(device)


def succeeds(device: torch.device) -> bool:
    """True if `product` works on this device, even if it is emulated in software."""
    values = torch.zeros(_MULTIPLE, _MULTIPLE, dtype=torch.uint8, device=device)
    tensors = {VALUES: values, SCALES: torch.ones(1, 1, device=device)}
    try:
        product(torch.zeros(1, _MULTIPLE, dtype=torch.bfloat16, device=device), tensors)
    except RuntimeError:  # what is supported depends on the versions of torch and CUDA
        return False
    return True


def quantises_activations(config: Mapping[str, Any]) -> bool:
    """True if a checkpoint's quantisation config prescribes float8 activations."""
    if config.get("quant_method") in ("fp8", "fbgemm_fp8"):
        return True
    groups: dict[str, dict[str, Any]] = config.get("config_groups", {})
    told = [group.get("input_activations") or {} for group in groups.values()]
    return bool(told) and all(one.get("type") == "float" and one.get("num_bits") == 8 for one in told)


def fits(packing: Packing, dtype: torch.dtype) -> bool:
    """True if a matrix in this format can be multiplied with activations of this dtype."""
    return (
        packing.number is Number.FP8
        and len(packing.shape) == 2
        and packing.block[0] in (1, packing.shape[0])
        and packing.block[1] == packing.shape[1]
        and not any(size % _MULTIPLE for size in packing.shape)
        and not packing.is_transposed
        and not packing.has_zeros
        and dtype == torch.bfloat16
    )


def product(x: torch.Tensor, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
    """x[..., K] @ matrix[N, K].T (+ bias), in the dtype of `x`."""
    x_TK, values_NK = x.reshape(-1, x.shape[-1]), tensors[VALUES].view(_FP8)
    scales_T1 = x_TK.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / _LARGEST
    quantised_TK = (x_TK / scales_T1).clamp(-_LARGEST, _LARGEST).to(_FP8)
    scales_1N = tensors[SCALES].float().view(1, -1).expand(1, len(values_NK)).contiguous()
    multiply: Any = getattr(torch, "_scaled_mm")  # noqa: B009 -- it has no public name
    out_TN = multiply(quantised_TK, values_NK.t(), scales_T1, scales_1N, out_dtype=x.dtype)
    if bias is not None:
        out_TN += bias
    return out_TN.view(*x.shape[:-1], -1)
