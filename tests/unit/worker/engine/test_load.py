import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ballast.common.errors import ConfigError
from services.worker.core.batch import Slice
from services.worker.engine import checkpoint
from services.worker.engine.checkpoint import revision_of
from services.worker.engine.load import Engine, load_engine
from services.worker.engine.model_config import ModelConfig, read_model_config
from services.worker.engine.native import library
from services.worker.engine.parameters import ParameterLayout, end_parameters, layer_parameters, layout_for
from services.worker.engine.pinned_readers import PinnedReaders
from tests.support.engine import KERNELS, forward
from tools.model.tiny import make_tiny

MEMORY_BYTES = 8 << 20
SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def load(model_dir: Path, **options: object) -> Engine:
    return load_engine(model_dir, **({"device_memory_bytes": MEMORY_BYTES, "dtype": "float32"} | options))  # pyright: ignore[reportArgumentType]


def config_of(engine: Engine) -> ModelConfig:
    assert isinstance(engine.config, ModelConfig)
    return engine.config


def refused(model_dir: Path, **options: object) -> str:
    with pytest.raises(ConfigError) as error:
        load(model_dir, **options)
    return str(error.value)


def rewrite(model_dir: Path, shard: str, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(model_dir / shard), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, model_dir / shard)


def shard_of(model_dir: Path, tensor: str) -> str:
    return json.loads((model_dir / "model.safetensors.index.json").read_text())["weight_map"][tensor]


def test_facts_and_memory(model_dir: Path) -> None:
    with load(model_dir, block_tokens=8) as engine:
        info = engine.info
        stored = {**load_file(model_dir / SHARD_1), **load_file(model_dir / SHARD_2)}
        assert info.parameter_count == sum(tensor.numel() for tensor in stored.values())
        assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, head dim, bytes
        assert (info.name, info.architecture, info.dtype) == ("model", "LlamaForCausalLM", "float32")
        assert (info.layer_count, info.vocab_size, info.max_model_len) == (2, 320, 256)
        assert engine.block_tokens == 8
        engine.check()
        report = engine.memory_report()
        assert report.parameter_bytes >= info.parameter_count * 4
        assert engine.block_count * 8 * info.kv_bytes_per_token <= report.kv_bytes


def test_a_revision_covers_weights_and_configuration(model_dir: Path, tmp_path: Path) -> None:
    revision = revision_of(model_dir)
    copy = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    said = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({"transformers_version": "9", **said}))
    assert revision_of(copy) == revision
    (copy / "config.json").write_text(json.dumps({**said, "rms_norm_eps": 0.5}))
    assert revision_of(copy) != revision
    (copy / "config.json").write_text(json.dumps(said))
    rewrite(copy, SHARD_1, {name: tensor + 1 for name, tensor in load_file(copy / SHARD_1).items()})
    assert revision_of(copy) != revision


def test_reported_facts_do_not_depend_on_the_memory(model_dir: Path) -> None:
    with load(model_dir) as engine, load(model_dir, device_memory_bytes=8 * MEMORY_BYTES + 4096) as large:
        assert engine.info == large.info
        assert engine.memory_report().extent_bytes == engine.memory.pool.extent_bytes


@pytest.mark.parametrize("kernels", KERNELS)
def test_fused_parameters_hold_the_checkpoint(model_dir: Path, kernels: str) -> None:
    stored = {**load_file(model_dir / SHARD_1), **load_file(model_dir / SHARD_2)}
    with load(model_dir, kernels=kernels) as engine:
        stored_layer, layout = engine.memory.parameters.layer(1), layout_for("cpu", engine.kernels)
        assert (layout is ParameterLayout.PANELS) == (kernels == "native")
        parameters = layer_parameters(config_of(engine), 1, layout)
        layer = {p.name: p.read(stored_layer[p.name], engine.kernels) for p in parameters}
        parts = [stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(layer["qkv"], torch.cat(parts))
        parts = [stored[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(layer["gate_up"], torch.cat(parts))
        assert torch.equal(layer["output"], stored["model.layers.1.self_attn.o_proj.weight"])
        head, table = end_parameters(config_of(engine), layout)["head"][1], engine.memory.parameters.part("head")
        assert torch.equal(head.read(table["weight"], engine.kernels), stored["lm_head.weight"])


def test_readers_load_the_same_parameters_through_their_own_memory(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The readers work as for a GPU, but without pinned memory."""
    slots: list[str] = []
    monkeypatch.setattr(checkpoint, "_BAND_ELEMENTS", 1 << 10)

    def empty(size_bytes: int) -> torch.Tensor:
        slots.append(threading.current_thread().name)
        return torch.empty(size_bytes, dtype=torch.uint8)

    with load(model_dir) as engine, checkpoint.Checkpoint(model_dir, engine.kernels) as opened:
        opened._readers = PinnedReaders(torch.device("cpu"), empty)
        layout = layout_for("cpu", engine.kernels)
        stored = engine.memory.parameters.layer(1)
        wanted = {name: tensor.clone() for name, tensor in stored.items()}
        for tensor in stored.values():
            tensor.fill_(-1.0)
        opened.fill(layer_parameters(config_of(engine), 1, layout), stored)
        assert all(torch.equal(stored[name], wanted[name]) for name in stored)
    assert len(set(slots)) == len(slots) > 0, "each reader must have its own slot"
    assert not any(thread.name.startswith("readers") for thread in threading.enumerate())


def test_tied_checkpoints_store_the_table_once(tmp_path: Path) -> None:
    with load(make_tiny("llama", tmp_path / "m", layers=1, tied=True)) as engine:
        assert "weight" not in engine.memory.parameters.part("head")


def test_kernels_are_chosen(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "use one of auto, native, torch" in refused(model_dir, kernels="fast")
    with load(model_dir, kernels="torch") as engine:
        assert engine.kernels is None
    monkeypatch.setattr(library, "LIBRARY", model_dir / "absent.so")
    monkeypatch.setattr(library, "native_kernels", lambda: None)
    assert "absent.so was not built; run `make setup`" in refused(model_dir, kernels="native")
    with load(model_dir) as engine:
        assert engine.kernels is None


def test_auto_takes_the_checkpoint_dtype(tmp_path: Path) -> None:
    with load(make_tiny("llama", tmp_path / "m", layers=1, dtype="bfloat16"), dtype="auto") as engine:
        assert engine.info.dtype == "bfloat16"
        assert engine.memory.kv.layer(0).dtype == torch.bfloat16


def test_closing_twice_is_allowed(model_dir: Path) -> None:
    engine = load(model_dir)
    engine.close()
    engine.close()


def test_a_missing_shard_is_named(model_dir: Path) -> None:
    (model_dir / SHARD_2).unlink()
    assert f"{model_dir / SHARD_2}: this shard is missing" in refused(model_dir)


def test_a_folder_without_weights_is_named(model_dir: Path) -> None:
    for path in model_dir.glob("model*"):
        path.unlink()
    assert "holds neither model.safetensors nor model.safetensors.index.json" in refused(model_dir)


def test_a_tensor_the_shard_lacks_is_named(model_dir: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    shard = shard_of(model_dir, name)
    rewrite(model_dir, shard, {name: None})
    assert f"{model_dir / shard}: {name}: the shard has no such tensor" in refused(model_dir)


def test_a_tensor_the_index_lacks_is_named(model_dir: Path) -> None:
    index = model_dir / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    assert "model.norm.weight: the checkpoint has no such tensor" in refused(model_dir)


def test_a_wrong_shape_is_named(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(model_dir, shard_of(model_dir, name), {name: torch.zeros(32, 63)})
    assert f"{name}: has shape [32, 63], config.json asks for [32, 64]" in refused(model_dir)


def test_a_wrong_dtype_is_named(model_dir: Path) -> None:
    name = "model.norm.weight"
    rewrite(model_dir, shard_of(model_dir, name), {name: torch.zeros(64, dtype=torch.int8)})
    assert f"{name}: has dtype I8" in refused(model_dir)


def test_a_tensor_without_use_is_named(model_dir: Path) -> None:
    index = model_dir / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.0.self_attn.q_proj.bias"] = SHARD_1
    content["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = SHARD_1
    index.write_text(json.dumps(content))
    extra = {
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),  # in old exports; ignored
    }
    rewrite(model_dir, SHARD_1, dict(extra))
    assert "q_proj.bias: is not a tensor of LlamaForCausalLM" in refused(model_dir)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100])
def test_a_corrupt_shard_is_named(model_dir: Path, content: bytes) -> None:
    (model_dir / SHARD_1).write_bytes(content)
    assert f"{model_dir / SHARD_1}: is not a readable safetensors file" in refused(model_dir)


def test_a_truncated_shard_is_named(model_dir: Path) -> None:
    content = (model_dir / SHARD_1).read_bytes()
    (model_dir / SHARD_1).write_bytes(content[: len(content) // 2])
    assert f"{model_dir / SHARD_1}: is not a readable safetensors file" in refused(model_dir)


@pytest.mark.parametrize("weight_map", [None, [], {"model.norm.weight": "../x.safetensors"}, {"a": 3}])
def test_a_damaged_index_is_named(model_dir: Path, weight_map: object) -> None:
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model.safetensors.index.json: weight_map" in refused(model_dir)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype: 'int8' is not supported"),
        ({"device": "tpu"}, "device: 'tpu' is not supported"),
        ({"max_model_len": 257}, "max_model_len: must be between 1 and 256"),
        ({"max_model_len": 0}, "max_model_len: must be between 1 and 256"),
        ({"device_memory_bytes": 100_000}, "device_memory_bytes: 97.7 KiB are too little"),
        ({"block_tokens": 0}, "block_tokens: must be at least 1"),
    ],
)
def test_unsupported_options_are_named(model_dir: Path, options: dict[str, object], message: str) -> None:
    assert message in refused(model_dir, **options)


def test_float16_agrees_with_float32(model_dir: Path) -> None:
    prompt = tuple(range(3, 43))
    logits: list[torch.Tensor] = []
    for dtype in ("float32", "float16"):
        with load(model_dir, dtype=dtype) as engine:
            assert engine.info.dtype == dtype
            blocks = range(-(-len(prompt) // engine.block_tokens))
            logits += forward(engine, [Slice(0, 0, prompt, True)], [tuple(blocks)])
    assert (logits[1].float() - logits[0]).std() < 5e-3 * logits[0].std()


def test_on_a_gpu_matrices_are_not_padded(model_dir: Path) -> None:
    """Padding to the width of a register helps a CPU, but breaks the tiles of a GPU's products."""
    config = read_model_config(model_dir)
    layout = layout_for("cuda:1", None)
    for part in (*end_parameters(config, layout).values(), layer_parameters(config, 0, layout)):
        for parameter in part:
            assert parameter.stored_shape(torch.bfloat16) == parameter.shape
