"""Checkpoints in the formats of quantisers, each with the equivalent dense checkpoint."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantised = tuple[Tensors, torch.Tensor]  # stored tensors that replace a matrix, and its dequantised value

DENSE = "dense"
_GROUP = 16
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def dense_of(folder: Path) -> Path:
    """The dense checkpoint that is equivalent to a folder's; the folder itself if it is not quantised."""
    beside = folder.parent / DENSE
    return beside if folder.name != DENSE and beside.exists() else folder


def quantise(dense: Path, out: Path, form: str) -> Path:
    """Writes `dense`, quantised in the format `form`, to `out`; overwrites `dense` with the dequantised values."""
    config, quantiser = FORMATS[form]
    tensors = {name: tensor for file in sorted(dense.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if _is_quantised(name, tensor, form):
            stored_here, stands_for = quantiser(name, tensor)
            stored |= stored_here
            tensors[name] = stands_for
        else:
            stored[name] = tensor
    told: dict[str, Any] = json.loads((dense / "config.json").read_text())
    shutil.copytree(dense, out)
    for folder, contents, extra in ((dense, tensors, {}), (out, stored, {"quantization_config": config})):
        for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
            file.unlink()
        half = len(contents) // 2
        names = list(contents)
        files = {"model-1.safetensors": names[:half], "model-2.safetensors": names[half:]}
        for file, inside in files.items():
            save_file({name: contents[name].contiguous() for name in inside}, folder / file, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, inside in files.items() for name in inside}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(told | extra))
    return out


def _is_quantised(name: str, tensor: torch.Tensor, form: str) -> bool:
    if form == "mxfp4":
        return tensor.dim() == 3
    outside = ("embed", "lm_head", "norm", "router", ".gate.", "wte", "wpe")
    return tensor.dim() == 2 and name.endswith(".weight") and not any(part in name for part in outside)


def _blocked(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The largest absolute value of each block of rows x columns."""
    n, k = tensor.shape
    padded = torch.nn.functional.pad(tensor.abs(), (0, -k % columns, 0, -n % rows))
    return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))


def _fp8_of(rows: int, columns: int, suffix: str) -> Callable[[str, torch.Tensor], Quantised]:
    def quantise_one(name: str, tensor: torch.Tensor) -> Quantised:
        n, k = tensor.shape
        grid = (_blocked(tensor, min(rows, n), min(columns, k)) / 448.0).clamp(min=1e-6)
        spread = grid.repeat_interleave(min(rows, n), 0)[:n].repeat_interleave(min(columns, k), 1)[:, :k]
        values = (tensor / spread).to(torch.float8_e4m3fn)
        return {name: values, f"{name}{suffix}": grid}, values.float() * spread

    return quantise_one


def _fp8_whole(name: str, tensor: torch.Tensor) -> Quantised:
    scale = tensor.abs().max() / 448.0
    values = (tensor / scale).to(torch.float8_e4m3fn)
    base = name.removesuffix(".weight")
    extra = {f"{base}.input_scale": torch.tensor([0.5])}
    return {name: values, f"{name}_scale": scale.reshape(1), **extra}, values.float() * scale


def _int8(name: str, tensor: torch.Tensor) -> Quantised:
    scale = tensor.abs().amax(1, keepdim=True) / 127.0
    values = (tensor / scale).round().clamp(-128, 127).to(torch.int8)
    return {name: values, f"{name}_scale": scale}, values.float() * scale


def _packed(bits: int, asymmetric: bool = False) -> Callable[[str, torch.Tensor], Quantised]:
    """compressed-tensors: unsigned values packed along the inputs, zero points along the outputs."""

    def quantise_one(name: str, tensor: torch.Tensor) -> Quantised:
        unsigned, scale, zero = _grouped(tensor, bits, asymmetric)
        stored = {
            f"{name}_packed": _in_words(unsigned, bits, 1),
            f"{name}_scale": scale,
            f"{name}_shape": torch.tensor(tensor.shape),
        }
        if asymmetric:
            stored[f"{name}_zero_point"] = _in_words(zero, bits, 0)
        return stored, _stands_for(unsigned, scale, zero)

    return quantise_one


def _gptq(bits: int) -> Callable[[str, torch.Tensor], Quantised]:
    def quantise_one(name: str, tensor: torch.Tensor) -> Quantised:
        unsigned, scale, zero = _grouped(tensor, bits, True)
        zero = zero.clamp(min=1)  # the format stores zero points minus one
        base = name.removesuffix(".weight")
        stored = {
            f"{base}.qweight": _in_words(unsigned.t().contiguous(), bits, 0),
            f"{base}.qzeros": _in_words(zero.t().contiguous() - 1, bits, 1),
            f"{base}.scales": scale.t().half(),
            f"{base}.g_idx": torch.arange(tensor.shape[1], dtype=torch.int32) // _GROUP,
        }
        return stored, _stands_for(unsigned, scale.half().float(), zero)

    return quantise_one


def _awq(name: str, tensor: torch.Tensor) -> Quantised:
    unsigned, scale, zero = _grouped(tensor, 4, True)
    base, order = name.removesuffix(".weight"), [0, 2, 4, 6, 1, 3, 5, 7]

    def in_order(numbers: torch.Tensor) -> torch.Tensor:
        return _in_words(numbers.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4, 1)

    stored = {
        f"{base}.qweight": in_order(unsigned.t()),
        f"{base}.qzeros": in_order(zero.t()),
        f"{base}.scales": scale.t().half(),
    }
    return stored, _stands_for(unsigned, scale.half().float(), zero)


def _mxfp4(name: str, tensor: torch.Tensor) -> Quantised:
    """GPT-OSS: from [E, K, N], values in blocks along K, [E, N, K / 32, 16] bytes, with scales [E, N, K / 32]."""
    grouped = tensor.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (grouped.abs().amax(3, keepdim=True) / 6.0).clamp(min=1e-6).log2().ceil()
    codes = ((grouped / exponents.exp2())[..., None] - _FP4).abs().argmin(-1).to(torch.uint8)
    stored = {
        f"{name}_blocks": codes[..., 0::2] | (codes[..., 1::2] << 4),
        f"{name}_scales": (exponents[..., 0] + 127).to(torch.uint8),
    }
    return stored, (_FP4[codes.int()] * exponents.exp2()).flatten(2).transpose(1, 2)


def _grouped(tensor: torch.Tensor, bits: int, asymmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned values [N, K], with scales and zero points [N, K / 16]."""
    groups = tensor.unflatten(1, (-1, _GROUP))
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    if asymmetric:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / most).clamp(min=1e-6)
        zero = (-low / scale).round().clamp(1, most).int()
    else:
        scale = (groups.abs().amax(2) / (middle - 1)).clamp(min=1e-6)
        zero = torch.full(scale.shape, middle, dtype=torch.int32)
    unsigned = ((groups / scale[..., None]).round().int() + zero[..., None]).clamp(0, most)
    return unsigned.flatten(1), scale, zero


def _stands_for(unsigned: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    size = unsigned.shape[1] // scale.shape[1]
    return (unsigned - zero.repeat_interleave(size, 1)).float() * scale.repeat_interleave(size, 1)


def _in_words(numbers: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    if dim == 0:
        return _in_words(numbers.t(), bits, 1).t().contiguous()
    per_word = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % per_word))
    words = (padded.unflatten(1, (-1, per_word)) << torch.arange(0, 32, bits)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _groups(form: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"g": group}}


# name -> quantization_config, and the function that quantises a matrix
FORMATS: dict[str, tuple[dict[str, Any], Callable[[str, torch.Tensor], Quantised]]] = {
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]},
        _fp8_of(16, 16, "_scale_inv"),
    ),
    "fp8 ragged": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 48]},
        _fp8_of(40, 48, "_scale_inv"),
    ),
    "fp8 channels": (
        _groups("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        _fp8_of(1, 1 << 20, "_scale"),
    ),
    "fp8 tensors": (_groups("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}), _fp8_whole),
    "int8": (_groups("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}), _int8),
    "w8a16": (_groups("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group"}), _packed(8)),
    "w4a16": (_groups("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"}), _packed(4)),
    "w4a16 zeros": (
        _groups("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": False}),
        _packed(4, asymmetric=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}, _awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}, _gptq(4)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "group_size": 16, "desc_act": False, "sym": False}, _gptq(8)),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head"]}, _mxfp4),
}
