"""Products with a layer's matrices: by torch, which picks kernels according to the number of rows, or by one kernel
whose results do not depend on it.

Shapes: T rows, K inputs, N outputs. Weights are [N, K].
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ballast.common.extras import lacking

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_TILE_ROWS, _TILE_SIZE, _WARPS, _STAGES = 64, 64, 4, 3
_MANY_OUTPUTS = 8192  # with this many outputs, tiles of 64 still give every multiprocessor a program

# x @ weight.T + bias, written to `out` if that is faster: (x [T, K], weight, bias, out [T, N] or empty)
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """The `Linear` of torch: oneDNN if it is faster, otherwise torch's default library."""
    if _onednn_suits(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _onednn_suits(x: torch.Tensor) -> bool:
    """True if oneDNN is faster than MKL, torch's default: by 10 %, or by a third with few rows and a matrix stored as
    [in, out]. For a single row it is not.
    """
    return _HAS_ONEDNN and x.dtype == torch.float32 and x.shape[0] > 1 and x.device.type == "cpu"


class InvariantProducts:
    """A `Linear` computed by one Triton kernel with fixed tiles, so that a row's result depends neither on the other
    rows, nor on their number or order.
    """

    def __init__(self) -> None:
        """Raises ConfigError if triton is not installed."""
        try:
            self._kernels: Any = importlib.import_module("services.worker.engine.invariant_kernel")
        except ImportError as error:
            raise lacking("batch_invariant", "triton", "cuda") from error

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        rows, (outputs, size) = x.shape[0], weight.shape
        if not out.numel():
            out = x.new_empty(rows, outputs)
        constants = product_constants(outputs, size, x.dtype, has_bias=bias is not None)
        self._kernels.multiply[(-(-rows // _TILE_ROWS), -(-outputs // constants["TILE_OUTPUTS"]))](
            out,
            x,
            weight,
            weight if bias is None else bias,
            rows,
            out.stride(0),
            x.stride(0),
            weight.stride(0),
            **constants,
        )
        return out


def product_constants(outputs: int, size: int, dtype: torch.dtype, *, has_bias: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel. They depend on the matrix alone."""
    wide = dtype == torch.float32
    return {
        "OUTPUTS": outputs,
        "SIZE": size,
        "HAS_BIAS": has_bias,
        "TILE_ROWS": _TILE_ROWS,
        "TILE_OUTPUTS": 64 if outputs >= _MANY_OUTPUTS and not wide else 32,
        "TILE_SIZE": _TILE_SIZE // 2 if wide else _TILE_SIZE,
        "PRECISION": "ieee" if wide else "tf32",
        "num_warps": _WARPS,
        "num_stages": _STAGES,
    }
