"""LoRA adapters in peft's format with random matrices, and the equivalent dense models."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from services.worker.engine.lora_files import CONFIG, WEIGHTS

EVERY_MODULE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model_dir: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = EVERY_MODULE,
    seed: int = 1,
    layers: Sequence[int] | None = None,
    **told: Any,
) -> Path:
    """Writes a LoRA adapter with weights so large that it changes the model's tokens. Returns its folder."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for key, matrix in _weights(model_dir).items():
        module = key.removesuffix(".weight")
        parts = module.split(".")
        if "layers" not in parts or parts[-1] not in targets:
            continue
        if layers is not None and int(parts[parts.index("layers") + 1]) not in layers:
            continue
        (outputs, inputs), name = matrix.shape, f"base_model.model.{module}"
        size = matrix.std() * math.sqrt(rank) / alpha
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=random)
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * size
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / CONFIG).write_text(json.dumps({**config, **told}))
    return folder


def merged(folder: Path, model_dir: Path, adapter: Path) -> Path:
    """Writes the merged checkpoint in float64, with matrices W + scale * B @ A. Returns its folder."""
    told = json.loads((adapter / CONFIG).read_text())
    scale = told["lora_alpha"] / (math.sqrt(told["r"]) if told.get("use_rslora") else told["r"])
    weights = {key: tensor.to(torch.float64) for key, tensor in _weights(model_dir).items()}
    low = {key: tensor.to(torch.float64) for key, tensor in load_file(adapter / WEIGHTS).items()}
    for key in low:
        if key.endswith(".lora_A.weight"):
            name = key.removesuffix(".lora_A.weight")
            weights[f"{name.removeprefix('base_model.model.')}.weight"] += (
                scale * low[f"{name}.lora_B.weight"] @ low[key]
            )
    folder.mkdir(parents=True)
    for path in model_dir.iterdir():
        if path.suffix == ".json" and ".index." not in path.name:
            shutil.copy(path, folder)
    save_file(weights, folder / "model.safetensors")
    return folder


def _weights(model_dir: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in sorted(model_dir.glob("*.safetensors")) for key, tensor in load_file(path).items()}
