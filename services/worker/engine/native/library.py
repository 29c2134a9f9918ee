"""The shared object, if built, and its functions on tensors. Calls release the GIL."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ballast.common.errors import ConfigError
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.native.structs import (
    ABI,
    PANEL,
    Attention,
    GatedExperts,
    Gemm,
    Grouped,
    Model,
    Rotation,
    Sampling,
    Step,
)

LIBRARY = Path(os.environ.get("BALLAST_KERNELS_LIBRARY") or Path(__file__).with_name("libballast_kernels.so"))
KERNELS = ("auto", "native", "torch")
Ints, Floats = NDArray[np.int64], NDArray[np.float64]
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_SAMPLED_DTYPES = {torch.float32: 0, torch.float64: 1}
_KV_DTYPES = _DTYPES | {torch.float8_e4m3fn: 3}

_I, _P, _D = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_FUNCTIONS: dict[str, tuple[tuple[type, ...], type | None]] = {
    "abi": ((), _I),
    "isa": ((_I,), ctypes.c_char_p),
    "chosen_isa": ((), ctypes.c_char_p),
    "choose_isa": ((_I,), None),
    "set_threads": ((_I,), _I),
    "gemm": ((_P,), None),
    "grouped": ((_P,), None),
    "experts": ((_P,), None),
    "rotate": ((_P,), None),
    "norm": ((_I, _P, _I, _P, _P, _I, _I, _D), None),
    "write_kv": ((_I, _I, _P, _P, _P, _I, _P, _I, _I, _I), None),
    "attend": ((_P,), None),
    "run_layers": ((_P, _P, _I, _I), None),
    "sample": ((_P,), None),
    "rank": ((_I, _P, _I, _I, _P, _P, _P), None),
    "pack": ((_I, _P, _I, _P, _I, _I), None),
    "unpack": ((_I, _P, _P, _I, _I, _P), None),
}


class RowParameters(NamedTuple):
    """Sampling parameters, one entry per row of logits."""

    temperatures: Floats  # 0: the most probable token
    top_k: Ints  # 0: all
    top_p: Floats
    min_p: Floats
    uniforms: Floats


class Kernels:
    """Kernels on CPU tensors with dense rows. Packed matrices have the shape given by `packed_shape`."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._functions: dict[str, Callable[..., object]] = {}
        self._threads = 1
        self._scratch = threading.local()
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(library, f"ballast_{name}")
            function.argtypes, function.restype = arguments, result
            self._functions[name] = function
        abi = self._functions["abi"]()
        if abi != ABI:
            raise OSError(f"{path} has interface {abi}, this version needs {ABI}; build it again (make setup)")

    @property
    def isas(self) -> tuple[str, ...]:
        """Instruction sets that this processor supports, best first."""
        names: list[str] = []
        while isinstance(name := self._functions["isa"](len(names)), bytes):
            names.append(name.decode())
        return tuple(names)

    @property
    def isa(self) -> str:
        name = self._functions["chosen_isa"]()
        assert isinstance(name, bytes)
        return name.decode()

    def choose_isa(self, name: str) -> None:
        """Set the instruction set of the whole process; no kernel may be running. For tests."""
        self._functions["choose_isa"](self.isas.index(name))

    @property
    def threads(self) -> int:
        """Number of computing threads of the whole process, the calling thread included."""
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        self._threads = count
        self._functions["set_threads"](count)

    def linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor:
        """out[T, outputs] = x[T, inputs] @ matrix.T (+ bias) (+ out). `out` may be float32 for bfloat16 inputs."""
        call = Gemm(
            dtype=_DTYPES[x.dtype],
            a=x.data_ptr(),
            a_stride=x.stride(0),
            packed=packed.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=x.shape[0],
            outputs=out.shape[1],
            inputs=x.shape[1],
            bias=bias.data_ptr() if bias is not None else None,
            add=add,
            wide=out.dtype != x.dtype,
        )
        self._functions["gemm"](ctypes.byref(call))
        return out

    def products(
        self, x: torch.Tensor, matrices: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x[T, inputs] @ matrix.T (+ bias) with a dense matrix [outputs, inputs]. A grouped product if `matrices` is
        [groups, outputs, inputs]: rows of `x` are sorted by group, and group i ends before row `ends[i]` (int64).
        """
        x = x if x.stride(1) == 1 else x.contiguous()
        outputs, inputs = matrices.shape[-2:]
        out = x.new_empty(x.shape[0], outputs)
        last = ctypes.c_int64(x.shape[0])
        call = Grouped(
            dtype=_DTYPES[x.dtype],
            a=x.data_ptr(),
            a_stride=x.stride(0),
            matrices=matrices.data_ptr(),
            out=out.data_ptr(),
            outputs=outputs,
            inputs=inputs,
            bias=bias.data_ptr() if bias is not None else None,
            groups=1 if ends is None else len(ends),
            ends=ctypes.addressof(last) if ends is None else ends.data_ptr(),
        )
        self._functions["grouped"](ctypes.byref(call))
        return out

    def experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        gate_up: tuple[torch.Tensor, torch.Tensor | None],
        down: tuple[torch.Tensor, torch.Tensor | None],
    ) -> torch.Tensor:
        """The weighted sum of each row's chosen experts; see `GatedExperts` in src/abi.h. `gate_up` and `down`: dense
        matrices of all experts, and biases.
        """
        x = x if x.stride(1) == 1 else x.contiguous()
        (rows, hidden), each, (experts, _, inner) = x.shape, chosen.shape[1], down[0].shape
        chosen, weights = chosen.to(torch.int64).contiguous(), weights.to(_wide(x.dtype)).contiguous()
        out, places = x.new_empty(rows, hidden), torch.empty(experts + rows * each, dtype=torch.int64)
        size_bytes = rows * each * hidden * x.element_size()
        scratch = self._scratch_memory(size_bytes + rows * each * 2 * inner * x.element_size())
        call = GatedExperts(
            _DTYPES[x.dtype],
            rows,
            hidden,
            inner,
            experts,
            each,
            x.data_ptr(),
            x.stride(0),
            chosen.data_ptr(),
            weights.data_ptr(),
            *(None if tensor is None else tensor.data_ptr() for tensor in (*gate_up, *down)),
            out.data_ptr(),
            places.data_ptr(),
            scratch,
            scratch + size_bytes,
        )
        self._functions["experts"](ctypes.byref(call))
        return out

    def _scratch_memory(self, size_bytes: int) -> int:
        """Address of this thread's scratch memory, which grows: fresh memory may cost a page fault per 4 KiB."""
        memory: torch.Tensor | None = getattr(self._scratch, "memory", None)
        if memory is None or len(memory) < size_bytes:
            memory = self._scratch.memory = torch.empty(size_bytes, dtype=torch.uint8)
        return memory.data_ptr()

    def rotated(self, x_TNH: torch.Tensor, cosines_TH: torch.Tensor, sines_TH: torch.Tensor) -> torch.Tensor:
        """x * cosines + rotate_half(x) * sines, as `transformers` writes it, in fresh memory."""
        x_TNH = x_TNH if x_TNH.stride(2) == 1 else x_TNH.contiguous()
        cosines_TH, sines_TH = cosines_TH.contiguous(), sines_TH.contiguous()
        out = torch.empty(x_TNH.shape, dtype=x_TNH.dtype)
        call = Rotation(
            _DTYPES[x_TNH.dtype],
            *x_TNH.shape,
            x_TNH.data_ptr(),
            x_TNH.stride(0),
            x_TNH.stride(1),
            cosines_TH.data_ptr(),
            sines_TH.data_ptr(),
            out.data_ptr(),
        )
        self._functions["rotate"](ctypes.byref(call))
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> torch.Tensor:
        self._functions["norm"](
            _DTYPES[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), *x.shape, eps
        )
        return out

    def pack(self, packed: torch.Tensor, first_row: int, rows: torch.Tensor) -> None:
        """Write rows [first_row, first_row + len(rows)) of a matrix to its packed form."""
        rows = rows.contiguous()
        self._functions["pack"](_DTYPES[packed.dtype], packed.data_ptr(), first_row, rows.data_ptr(), *rows.shape)

    def unpack(self, packed: torch.Tensor, rows: torch.Tensor, inputs: int) -> torch.Tensor:
        """The rows of a matrix selected by index (int64), as a fresh [rows, inputs] tensor."""
        out = torch.empty(len(rows), inputs, dtype=packed.dtype)
        self._functions["unpack"](
            _DTYPES[packed.dtype], packed.data_ptr(), rows.data_ptr(), len(rows), inputs, out.data_ptr()
        )
        return out

    def write_kv(self, kv_B2TKH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, slots: int) -> None:
        """Write K and V to the cache. `slots`: address of an int64 per row, block * block tokens + offset."""
        if k_TKH.stride(0) != v_TKH.stride(0):
            k_TKH, v_TKH = k_TKH.contiguous(), v_TKH.contiguous()
        rows, heads, head_dim = k_TKH.shape
        self._functions["write_kv"](
            _DTYPES[k_TKH.dtype],
            kv_dtype_code(kv_B2TKH.dtype),
            kv_B2TKH.data_ptr(),
            k_TKH.data_ptr(),
            v_TKH.data_ptr(),
            k_TKH.stride(0),
            slots,
            rows,
            heads * head_dim,
            kv_B2TKH.shape[2],
        )

    def attend(self, call: Attention) -> None:
        self._functions["attend"](ctypes.byref(call))

    def sample(self, logits_RV: torch.Tensor, parameters: "RowParameters") -> Ints:
        """Sample one token per row of float32 or float64 logits; `Sampling` in src/abi.h describes the parameters."""
        rows, vocabulary = logits_RV.shape
        chosen = np.empty(rows, np.int64)
        columns = [np.ascontiguousarray(column) for column in parameters]
        call = Sampling(
            _SAMPLED_DTYPES[logits_RV.dtype],
            logits_RV.data_ptr(),
            logits_RV.stride(0),
            rows,
            vocabulary,
            *(column.ctypes.data for column in columns),
            chosen.ctypes.data,
        )
        self._functions["sample"](ctypes.byref(call))
        if (chosen < 0).any():
            raise MemoryError(f"no memory to draw from {rows} rows of {vocabulary} logits")
        return chosen

    def rank(self, logits_V: torch.Tensor, count: int) -> tuple[Ints, Floats, float, float]:
        """The `count` best tokens, ties by id; their logits; the best logit; log(sum(exp(x - best))) over all x."""
        indices, values, totals = np.empty(count, np.int64), np.empty(count), np.empty(2)
        self._functions["rank"](
            _SAMPLED_DTYPES[logits_V.dtype],
            logits_V.data_ptr(),
            len(logits_V),
            count,
            indices.ctypes.data,
            values.ctypes.data,
            totals.ctypes.data,
        )
        return indices, values, float(totals[0]), float(totals[1])

    def run_layers(self, model: Model, step: Step, first: int, last: int) -> None:
        """Run the layers [first, last), attention included."""
        self._functions["run_layers"](ctypes.byref(model), ctypes.byref(step), first, last)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_code(dtype: torch.dtype) -> int:
    return _DTYPES[dtype]


def kv_dtype_code(dtype: torch.dtype) -> int:
    return _KV_DTYPES[dtype]


def packed_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of a packed matrix: panels of 32 outputs, each [inputs, 32]; in bfloat16 inputs are stored in pairs,
    [inputs / 2, 32, 2].
    """
    outputs, inputs = shape
    panels = -(-outputs // PANEL)
    if dtype == torch.bfloat16:
        return (panels, inputs // 2, PANEL, 2)
    return (panels, inputs, PANEL)


@functools.cache
def native_kernels() -> Kernels | None:
    """The compiled kernels; None if the shared object was not built."""
    return Kernels(LIBRARY) if LIBRARY.exists() else None


def choose_kernels(wanted: str, device: str, config: ModelConfig | None, dtype: torch.dtype) -> Kernels | None:
    """The compiled kernels, or None for torch's. "auto" selects the compiled ones if possible. `config` None:
    the kernels compute only attention and sampling of the model, not its layers.

    Raises:
        ConfigError: `wanted` is unknown, or is "native" and the compiled kernels cannot be used.
    """
    if wanted not in KERNELS:
        raise ConfigError("kernels", f"{wanted!r} is not supported; use one of {', '.join(KERNELS)}")
    if wanted == "torch":
        return None
    why_not, kernels = _why_not(device, config, dtype), None
    if why_not is None:
        try:
            kernels = native_kernels()
            why_not = f"{LIBRARY} was not built; run `make setup` where there is a compiler for C++"
        except OSError as error:
            why_not = str(error)
    if kernels is None and wanted == "native":
        raise ConfigError("kernels", f"the native kernels cannot be used: {why_not}")
    return kernels


def _why_not(device: str, config: ModelConfig | None, dtype: torch.dtype) -> str | None:
    if config is not None and config.rank_count > 1:
        return "they compute all layers in one call, but tensor parallelism needs a sum over ranks in each layer"
    if device != "cpu":
        return f"they are for CPUs, the device is {device}"
    if dtype not in _DTYPES:
        return f"they do not support {dtype}"
    if config is None:
        return None
    sizes = (config.hidden_size, config.query_size, config.intermediate_size)
    if dtype == torch.bfloat16 and any(size % 2 for size in sizes):
        return f"in bfloat16 they need even sizes, the model has {sizes}"
    return None
