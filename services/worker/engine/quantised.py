"""Quantised matrices: how checkpoints store them, their layout in memory, and dequantisation.

In memory, a matrix of any format is `values` (float8, int8, or two 4-bit values per byte along the inputs), a scale per
block of rows and columns, and zero points if the format has them. Activations are computed in the model's dtype, and
their scales in a checkpoint are ignored. For KV scales see `kv_dtype`.

Shapes: N outputs, K inputs, G groups of inputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from ballast.common.errors import ConfigError
from services.worker.memory.parameters import TensorSpec

VALUES, SCALES, ZEROS = "values", "scales", "zeros"
METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "mxfp4")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each column among the eight of a word
_MX_BLOCK = 32
_SCALE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "F8_E8M0": torch.uint8,
}
# Tensors that belong to no matrix: scales of activations and KV, and redundant shapes.
_UNREAD = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "weight_shape",
)


class Number(StrEnum):
    """Number format of a matrix's values."""

    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    FP4 = "fp4"

    @property
    def bits(self) -> int:
        return 8 if self in (Number.FP8, Number.INT8) else 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Memory layout of a matrix or a stack of expert matrices: `shape` is [..., N, K]."""

    shape: tuple[int, ...]
    number: Number
    block: tuple[int, int]  # (rows, columns) that share a scale
    scale_dtype: torch.dtype  # uint8: exponents with a bias of 127
    has_zeros: bool = False
    is_transposed: bool = False  # the module multiplies with [..., K, N]

    @property
    def dense_shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.shape
        return (*lead, columns, rows) if self.is_transposed else self.shape

    @property
    def specs(self) -> dict[str, TensorSpec]:
        *lead, rows, columns = self.shape
        grid = (*lead, -(-rows // self.block[0]), -(-columns // self.block[1]))
        packed = TensorSpec(
            (*lead, rows, columns * self.number.bits // 8),
            torch.int8 if self.number is Number.INT8 else torch.uint8,
        )
        specs = {VALUES: packed, SCALES: TensorSpec(grid, self.scale_dtype)}
        return specs | ({ZEROS: TensorSpec(grid, torch.int8)} if self.has_zeros else {})

    def dense(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Dequantise the matrix, the stack of experts, or a single expert if the tensors are one expert's."""
        wide = torch.promote_types(dtype, torch.float32)
        numbers = self._numbers(tensors[VALUES], wide)
        if self.has_zeros:
            numbers = numbers.sub_(self._spread(tensors[ZEROS].to(wide), numbers.shape))
        scales = tensors[SCALES]
        scales = (scales.to(wide) - 127).exp2() if scales.dtype == torch.uint8 else scales.to(wide)
        dense = numbers.mul_(self._spread(scales, numbers.shape)).to(dtype)
        return dense.transpose(-1, -2) if self.is_transposed else dense

    def _numbers(self, values: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        if self.number is Number.FP8:
            return values.view(torch.float8_e4m3fn).to(wide)
        if self.number is Number.INT8:
            return values.to(wide)
        halves = torch.stack([values & 15, values >> 4], -1).flatten(-2)
        if self.number is Number.INT4:
            return halves.to(wide) if self.has_zeros else halves.to(wide).sub_(8)
        table = torch.tensor([*_FP4, *(-number for number in _FP4)], dtype=wide, device=values.device)
        return table[halves.int()]

    def _spread(self, grid: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Expand a grid of block values to elements, or to a shape that broadcasts."""
        for dim, block in ((-2, self.block[0]), (-1, self.block[1])):
            if grid.shape[dim] > 1 and block > 1:
                grid = grid.repeat_interleave(block, dim).narrow(dim, 0, shape[dim])
        return grid


class Slices(Protocol):
    """Lazy tensors of files by name, as in `safetensors`: read when indexed."""

    def __call__(self, key: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A quantised matrix of a checkpoint, under the name of its dense equivalent."""

    packing: Packing
    read: Callable[[], Mapping[str, torch.Tensor]]  # name -> tensor, as in the packing's specs

    def get_shape(self) -> list[int]:
        return list(self.packing.dense_shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: object) -> torch.Tensor:
        return self.packing.dense(self.read(), torch.float32)[cast(Any, index)]


def quantisation_of(model_dir: Path, told: Mapping[str, object]) -> Mapping[str, Any] | None:
    """The quantisation declared in config.json.

    Raises:
        ConfigError: the method is not supported.
    """
    found = told.get("quantization_config", told.get("compression_config"))
    if found is None:
        return None
    where = f"{model_dir / 'config.json'}: quantization_config"
    if not isinstance(found, dict):
        raise ConfigError(where, "must be an object")
    config = cast("dict[str, Any]", found)
    method = config.get("quant_method")
    if method not in METHODS:
        raise ConfigError(where, f"quant_method {method!r} is not supported; these are: {', '.join(METHODS)}")
    bits = config.get("bits", config.get("w_bit", 4))
    if method in ("awq", "gptq") and bits not in ((4,) if method == "awq" else (4, 8)):
        raise ConfigError(f"{where}.bits", f"{bits} is not supported with {method}")
    if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
        raise ConfigError(f"{where}.version", f"{config['version']!r} is not supported, gemm is")
    return config


def find_quantised(
    places: Mapping[str, Path], config: Mapping[str, Any], slices: Slices
) -> tuple[dict[str, QuantisedMatrix], set[str]]:
    """The quantised matrices among a checkpoint's tensors, and the names of all tensors that belong to them.

    Raises:
        ConfigError: a matrix is stored in an unsupported way.
    """
    matrices: dict[str, QuantisedMatrix] = {}
    used = {key for key in places if key.rpartition(".")[2] in _UNREAD}
    for key, parts in _grouped(places):
        where = f"{places[next(iter(parts.values()))]}: {key}"
        matrices[key] = _matrix(where, parts, config, slices)
        used.update(parts.values())
    return matrices, used


def _grouped(places: Mapping[str, Path]) -> Iterator[tuple[str, dict[str, str]]]:
    """Names of quantised matrices, each with the names of its tensors by role (values, scales, ...)."""
    companions = ("weight_scale_inv", "weight_scale", "weight_zero_point", "weight_g_idx", "qzeros", "scales", "g_idx")
    for key in places:
        base, _, leaf = key.rpartition(".")
        if leaf in ("qweight", "weight_packed", "weight"):
            parts = {name: f"{base}.{name}" for name in companions if f"{base}.{name}" in places}
            if parts:
                yield f"{base}.weight", {leaf: key, **parts}
        elif leaf.endswith("_blocks") and (scales := key.removesuffix("blocks") + "scales") in places:
            yield key.removesuffix("_blocks"), {"blocks": key, "scales": scales}


def _matrix(where: str, parts: Mapping[str, str], config: Mapping[str, Any], slices: Slices) -> QuantisedMatrix:
    if "blocks" in parts:
        return _mxfp4(parts, slices)
    if "qweight" in parts:
        return _by_columns(where, parts, config, slices)
    if "weight_packed" in parts:
        return _by_rows(where, parts, config, slices)
    return _plain(where, parts, config, slices)


def _mxfp4(parts: Mapping[str, str], slices: Slices) -> QuantisedMatrix:
    """A matrix in OpenAI's MXFP4: [E, N, G, 16] bytes, and an exponent per group of 32."""
    experts, rows, groups, _ = slices(parts["blocks"]).get_shape()
    packing = Packing(
        shape=(experts, rows, groups * _MX_BLOCK),
        number=Number.FP4,
        block=(1, _MX_BLOCK),
        scale_dtype=torch.uint8,
        is_transposed=True,
    )

    def read() -> dict[str, torch.Tensor]:
        return {VALUES: slices(parts["blocks"])[...].flatten(-2), SCALES: slices(parts["scales"])[...]}

    return QuantisedMatrix(packing, read)


def _by_columns(where: str, parts: Mapping[str, str], config: Mapping[str, Any], slices: Slices) -> QuantisedMatrix:
    """A matrix of AWQ or GPTQ: [K, N] in int32 words of several columns (AWQ, in its own order) or rows (GPTQ)."""
    is_awq = config["quant_method"] == "awq"
    bits = 4 if is_awq else int(config.get("bits", 4))
    per_word = 32 // bits
    groups, rows = slices(parts["scales"]).get_shape()
    first, second = slices(parts["qweight"]).get_shape()
    columns = first if is_awq else first * per_word
    if rows != (second * per_word if is_awq else second):
        raise ConfigError(where, f"its scales are of {rows} outputs, its values are not")
    if config.get("desc_act") and "g_idx" in parts and not _ascends(slices(parts["g_idx"])[...], columns // groups):
        raise ConfigError(where, "its groups are in the order of activations (desc_act), which is not supported")
    number = Number.INT4 if bits == 4 else Number.INT8
    packing = Packing(
        shape=(rows, columns),
        number=number,
        block=(1, columns // groups),
        scale_dtype=_scale_dtype(where, slices(parts["scales"])),
        has_zeros=True,
    )
    # GPTQ's first format stores zero points minus one; without zero points, the middle of the range is the zero point.
    more = 0 if is_awq or config.get("checkpoint_format", "gptq") == "gptq_v2" else 1

    def read() -> dict[str, torch.Tensor]:
        values_KN = _words(slices(parts["qweight"])[...], bits, is_awq, by_rows=not is_awq)
        zeros_GN = torch.full((groups, rows), 1 << (bits - 1), dtype=torch.int32)
        if "qzeros" in parts:
            zeros_GN = _words(slices(parts["qzeros"])[...], bits, is_awq, by_rows=False)[:, :rows] + more
        scales_NG = slices(parts["scales"])[...].t()
        if number is Number.INT4:
            return {VALUES: _joined(values_KN.t()), SCALES: scales_NG, ZEROS: zeros_GN.t()}
        return {VALUES: values_KN.t() - 128, SCALES: scales_NG, ZEROS: zeros_GN.t() - 128}

    return QuantisedMatrix(packing, read)


def _by_rows(where: str, parts: Mapping[str, str], config: Mapping[str, Any], slices: Slices) -> QuantisedMatrix:
    """A matrix of compressed-tensors pack-quantized: [N, K] in int32 words along K; zero points in words along N."""
    rows, words = slices(parts["weight_packed"]).get_shape()
    scale = slices(parts["weight_scale"])
    scale_rows, groups = scale.get_shape()
    bits = _packed_bits(where, config)
    columns = words * 32 // bits
    if "weight_g_idx" in parts and not _ascends(slices(parts["weight_g_idx"])[...], columns // groups):
        raise ConfigError(where, "its groups are in the order of activations (actorder), which is not supported")
    if columns % groups:
        raise ConfigError(where, f"{columns} inputs do not divide into {groups} groups")
    number = Number.INT4 if bits == 4 else Number.INT8
    packing = Packing(
        shape=(rows, columns),
        number=number,
        block=(rows // scale_rows, columns // groups),
        scale_dtype=_scale_dtype(where, scale),
        has_zeros="weight_zero_point" in parts,
    )

    def read() -> dict[str, torch.Tensor]:
        packed = slices(parts["weight_packed"])[...]
        values = packed.view(torch.uint8) if bits == 4 else (packed.view(torch.uint8) ^ 128).view(torch.int8)
        tensors = {VALUES: values, SCALES: slices(parts["weight_scale"])[...]}
        if packing.has_zeros:
            zeros = _words(slices(parts["weight_zero_point"])[...], bits, False, by_rows=True)[:scale_rows]
            tensors[ZEROS] = zeros if bits == 4 else zeros - 128
        return tensors

    return QuantisedMatrix(packing, read)


def _plain(where: str, parts: Mapping[str, str], config: Mapping[str, Any], slices: Slices) -> QuantisedMatrix:
    """A matrix with one byte per value: [N, K] of float8 or int8, with one scale in total, per row or per block."""
    key = parts.get("weight_scale_inv", parts.get("weight_scale"))
    values = slices(parts["weight"])
    dtype, shape = str(values.get_dtype()), tuple(values.get_shape())
    number = {"F8_E4M3": Number.FP8, "I8": Number.INT8}.get(dtype)
    if key is None or number is None or len(shape) != 2 or (number is Number.INT8 and "weight_scale_inv" in parts):
        raise ConfigError(where, f"a quantised matrix of {dtype} with {', '.join(parts)} is not supported")
    rows, columns = shape
    grid = tuple(slices(key).get_shape())
    grid = (1, 1) if math.prod(grid) == 1 else (*grid, 1) if len(grid) == 1 else grid
    block = _block(where, rows, columns, grid, config)
    packing = Packing(
        shape=shape,
        number=number,
        block=block,
        scale_dtype=_scale_dtype(where, slices(key)),
        has_zeros="weight_zero_point" in parts,
    )

    def read() -> dict[str, torch.Tensor]:
        weight = slices(parts["weight"])[...]
        tensors = {
            VALUES: weight.view(torch.uint8) if number is Number.FP8 else weight,
            SCALES: _bytes_of_exponents(slices(key)[...]).reshape(grid),
        }
        if packing.has_zeros:
            tensors[ZEROS] = slices(parts["weight_zero_point"])[...].reshape(grid)
        return tensors

    return QuantisedMatrix(packing, read)


def _block(where: str, rows: int, columns: int, grid: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, int]:
    if grid in ((1, 1), (rows, 1)):
        return rows // grid[0], columns
    told = config.get("weight_block_size")
    for group in config.get("config_groups", {}).values():
        told = told or (group.get("weights") or {}).get("block_structure")
    block = tuple(told) if isinstance(told, list) and len(cast("list[Any]", told)) == 2 else ()
    if len(block) != 2 or (-(-rows // block[0]), -(-columns // block[1])) != grid:
        raise ConfigError(where, f"has scales of shape {list(grid)}, config.json has blocks of {list(block)}")
    return block


def _packed_bits(where: str, config: Mapping[str, Any]) -> int:
    groups = [group.get("weights") or {} for group in config.get("config_groups", {}).values()]
    found = {(group.get("num_bits"), group.get("type", "int")) for group in groups}
    for bits in (4, 8):
        if found == {(bits, "int")}:
            return bits
    raise ConfigError(where, f"config_groups of {sorted(map(str, found))} are not supported packed")


def _scale_dtype(where: str, scale: Any) -> torch.dtype:
    if (dtype := str(scale.get_dtype())) not in _SCALE_DTYPES:
        raise ConfigError(where, f"has scales of {dtype}, supported are {', '.join(_SCALE_DTYPES)}")
    return _SCALE_DTYPES[dtype]


def _bytes_of_exponents(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


def _words(words: torch.Tensor, bits: int, is_awq: bool, *, by_rows: bool) -> torch.Tensor:
    """Unpack int32 words, each of which holds values of several rows, or of several columns."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if by_rows:
        return ((words[:, None, :] >> shifts[None, :, None]) & ((1 << bits) - 1)).flatten(0, 1)
    numbers = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    if is_awq:
        numbers = numbers[:, :, list(_AWQ_ORDER)]
    return numbers.flatten(1, 2)


def _joined(numbers: torch.Tensor) -> torch.Tensor:
    """Pack pairs of 4-bit values into bytes, the first one low."""
    halves = numbers.to(torch.uint8)
    return halves[:, 0::2] | (halves[:, 1::2] << 4)


def _ascends(group_of: torch.Tensor, size: int) -> bool:
    """True if groups of `size` inputs are in ascending order, or if no order was stored (all -1)."""
    wanted = torch.arange(len(group_of)) // size
    return bool((group_of < 0).all()) or torch.equal(group_of.long(), wanted)
