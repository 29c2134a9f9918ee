"""Determines, before any process is started, whether and how a worker on this machine would serve a checkpoint.

Models that Ballast implements are recognised in this process. For others a subprocess that imports transformers is
asked (`services.worker.engine.describe`), if that is installed.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ballast.common.errors import ConfigError
from ballast.common.units import human_bytes
from services.worker.engine.model_config import read_json, read_model_config
from tools.model.info import CheckpointInfo
from tools.model.safetensors_file import DTYPES

_PATIENCE_S = 180.0
_GPUS_GIB = (24, 48, 80, 141)
_NEEDED = ("torch", "transformers")


def check_served(folder: Path, model_impl: str = "auto", ranks: int = 1) -> None:
    """Check that a worker on this machine could serve a checkpoint.

    Raises:
        ConfigError: no worker could; the message says why.
    """
    if model_impl != "transformers":
        read_json(folder / "config.json")
        try:
            config = read_model_config(folder)
        except ConfigError:
            if model_impl == "ballast" or not can_describe():
                raise
        else:
            config.of_rank(0, ranks)
            return
    if (why := described(folder, model_impl, ranks).get("refused")) is not None:
        where, _, text = str(why).partition(": ")
        raise ConfigError(where, text)


def describe(folder: Path, info: CheckpointInfo | None = None) -> dict[str, Any]:
    """The result of `described`, or the part of it that can be determined without torch.

    `info`: facts from the headers of the tensors' files, with which no subprocess is needed for Ballast's own models.
    """
    try:
        own = read_model_config(folder)
    except ConfigError as error:
        return described(folder) if can_describe() else {"refused": str(error)}
    if info is None:
        return described(folder) if can_describe() else {"served_by": "ballast", "architecture": own.architecture}
    ends = own.vocab_size * own.hidden_size * (1 if own.tied_embeddings else 2)
    other_bytes = info.parameter_bytes * ends // info.parameter_count
    return {
        "served_by": "ballast",
        "layer_bytes": info.parameter_bytes - other_bytes,
        "other_bytes": other_bytes,
        "kv_bytes_per_token": info.kv_bytes_per_token(),
    }


def served_lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) pairs to print for a result of `describe`."""
    if (why := told.get("refused")) is not None:
        return [("refused", str(why))]
    if told["served_by"] == "ballast":
        lines = [("computed by", "Ballast's own classes")]
    else:
        what = ", ".join(told["attention"]) or "plain"
        kv, needed = told["kv_bytes_per_token"], told["kv_needed_bytes_per_token"]
        narrow = kv // DTYPES[told["dtype"]][1]
        lost = f" ({human_bytes(needed)} if layers had slots of different sizes)" if needed < kv else ""
        lines = [
            ("computed by", f"transformers' {told['architecture']}, attention: {what}"),
            ("parameters", _parameters(told)),
            ("maximum length", f"{told['max_model_len']:,} tokens"),
            ("KV per token", f"{human_bytes(kv)} {told['dtype']}{lost}, {human_bytes(narrow)} fp8_e4m3"),
        ]
    if "layer_bytes" in told:
        whole = told["layer_bytes"] + told["other_bytes"]
        shares = [f"{100 * whole / (size << 30):.0f} % of {size} GiB" for size in _GPUS_GIB if whole < size << 30]
        tokens = told["layer_bytes"] // told["kv_bytes_per_token"]
        lines += [
            ("parameters take", ", ".join(shares) or "more than one GPU of 141 GiB"),
            ("a pair gains", f"{human_bytes(told['layer_bytes'])} for KV when it drops: {tokens:,} tokens"),
        ]
    return lines


def _parameters(told: dict[str, Any]) -> str:
    count, size = told["parameter_count"], told["layer_bytes"] + told["other_bytes"]
    kept = f", {told['quantised']} in memory" if told.get("quantised") else ""
    each = f"{size / count:.2f} bytes each{kept}"
    return f"{count:,} of {each}; {human_bytes(told['layer_bytes'])} of them in layers"


def can_describe() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in _NEEDED)


def described(folder: Path, model_impl: str = "auto", ranks: int = 1) -> dict[str, Any]:
    """Ask the subprocess about a checkpoint. Returns the fields of `services.worker.engine.describe.Description`, or
    `refused` with the reason if no worker could serve it.

    Raises:
        ConfigError: torch or transformers is not installed, or the subprocess failed.
    """
    if not can_describe():
        raise ConfigError(str(folder), 'can be described only with pip install "ballast-serve[worker]"')
    command = [sys.executable, "-m", "services.worker.engine.describe", str(folder), "--model-impl", model_impl]
    command += ["--tensor-parallel-size", str(ranks)]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(str(folder), f"was not described within {_PATIENCE_S:g} s") from error
    lines = told.stdout.strip().splitlines()
    if told.returncode or not lines:
        raise ConfigError(str(folder), f"cannot be described: {told.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
