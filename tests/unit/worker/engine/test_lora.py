"""Which adapter folders are served, and which are refused with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ballast.common.errors import ConfigError
from services.worker.engine.load import load_engine
from services.worker.engine.lora_files import CONFIG, WEIGHTS, own_linears, read_adapters
from services.worker.engine.model_config import read_model_config
from tests.support.adapters import write_adapter
from tools.model.tiny import make_tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=2, max_len=128)


def read(folder: Path, model_dir: Path) -> Any:
    return read_adapters({"one": folder}, own_linears(read_model_config(model_dir)))[0]


def test_the_contents_of_a_folder_are_read(model_dir: Path, tmp_path: Path) -> None:
    adapter = read(
        write_adapter(tmp_path / "a", model_dir, rank=4, alpha=6, targets=("q_proj", "down_proj")), model_dir
    )
    assert (adapter.name, adapter.rank, adapter.scale, len(adapter.ranks)) == ("one", 4, 1.5, 4)
    assert adapter.element_count() == 2 * (4 * (64 + 64) + 4 * (64 + 176))
    assert adapter.element_count(2) == 2 * (4 * (64 + 32) + 4 * (64 + 88))
    rs = write_adapter(tmp_path / "b", model_dir, rank=4, alpha=6, use_rslora=True)
    assert read(rs, model_dir).scale == 3.0
    assert read(rs, model_dir).revision != adapter.revision
    assert read(rs, model_dir).revision == read(rs, model_dir).revision


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type: must be LORA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: .*changes the model's own weights"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
        ({"r": 5}, "has rank 4 and 4, adapter_config.json says r = 5"),
        ({"r": "4"}, "r: must be a whole number"),
        ({"lora_alpha": None}, "lora_alpha: must be a number"),
    ],
)
def test_unsupported_keys_are_refused_by_name(told: dict[str, Any], why: str, model_dir: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", model_dir, **told)
    with pytest.raises(ConfigError, match=why):
        read(folder, model_dir)


def test_keys_without_effect_are_ignored(model_dir: Path, tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "lora_dropout": 0.1,
        "base_model_name_or_path": "x/y",
        "task_type": "CAUSAL_LM",
        "init_lora_weights": True,
    }
    read(write_adapter(tmp_path / "a", model_dir, **said, use_dora=False, modules_to_save=None), model_dir)


Tensors = dict[str, torch.Tensor]
CHANGES: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (lambda t: {**t, "base_model.model.lm_head.lora_embedding_A": torch.ones(2, 2)}, "lm_head.lora_embedding_A"),
    (lambda t: {**t, "base_model.model.lm_head.weight": torch.ones(2, 2)}, "lm_head.weight"),
    (lambda t: {k.replace("q_proj", "qkv_proj"): v for k, v in t.items()}, "qkv_proj: is no linear module"),
    (lambda t: {k.replace("layers.1", "layers.2"): v for k, v in t.items()}, "layers.2.*is no linear module"),
    (lambda t: {k: v[:, :-1] if "lora_A" in k else v for k, v in t.items()}, "is it of another model"),
    (lambda t: {k: v for k, v in t.items() if "lora_B" not in k}, "needs two matrices"),
    (lambda _: {}, "has no tensors"),
]


@pytest.mark.parametrize(("change", "why"), CHANGES)
def test_tensors_without_a_target_module_are_refused(
    change: Callable[[Tensors], Tensors], why: str, model_dir: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", model_dir)
    save_file({k: v.contiguous() for k, v in change(load_file(folder / WEIGHTS)).items()}, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=why):
        read(folder, model_dir)


def test_unreadable_files_are_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a LoRA adapter is a folder with adapter_config.json"):
        read(tmp_path / "nowhere", model_dir)
    folder = write_adapter(tmp_path / "a", model_dir)
    (folder / WEIGHTS).write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(folder, model_dir)
    (folder / CONFIG).write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read(folder, model_dir)
    (folder / CONFIG).write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="peft_type"):
        read(folder, model_dir)


def test_adapters_count_towards_the_memory_budget(model_dir: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", model_dir, rank=64)
    with load_engine(model_dir, device_memory_bytes=8 << 20) as engine:
        alone = engine.memory_report()
    with load_engine(model_dir, device_memory_bytes=8 << 20, lora_modules={"a": adapter}) as engine:
        with_adapter, info = engine.memory_report(), engine.info
    size = 4 * sum(tensor.numel() for tensor in load_file(adapter / WEIGHTS).values())
    assert alone.budget_bytes - with_adapter.budget_bytes == size
    assert [one.name for one in info.adapters] == ["a"]


def test_the_compiled_kernels_support_no_adapters(model_dir: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", model_dir)
    with pytest.raises(ConfigError, match="compute no LoRA adapters"):
        load_engine(model_dir, device_memory_bytes=8 << 20, lora_modules={"a": adapter}, kernels="native")
