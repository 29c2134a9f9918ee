"""Tests of models computed by `transformers` other than their tokens: which are chosen, the self-test, memory, and
refusals.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ballast.common.errors import ConfigError
from services.worker.engine.choice import own_config
from services.worker.engine.describe import describe_model
from services.worker.engine.load import load_engine
from services.worker.engine.native.library import Kernels
from services.worker.engine.transformers_model import TransformersDecoder, TransformersModel
from tests.support.engine import NEEDS_NATIVE, Job, generate
from tests.support.families import greedy_alone, made_random, write_family
from tests.support.model_types import small_configuration
from tools.model.tiny import make_tiny

MEMORY_BYTES = 8 << 20


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_moe", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("mistral", tmp_path_factory.mktemp("tiny") / "model", layers=2, vocab=512, max_len=128)


def change(folder: Path, into: Path, **values: Any) -> Path:
    into.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    told = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**told, **values}))
    return into


def test_our_classes_serve_supported_models_up_to_the_window(tiny: Path, experts: Path, tmp_path: Path) -> None:
    assert own_config(tiny, "auto") is not None
    assert own_config(tiny, "transformers") is None
    assert own_config(experts, "auto") is None
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM"):
        own_config(experts, "ballast")
    windowed = change(tiny, tmp_path / "windowed", sliding_window=32)
    assert own_config(windowed, "auto", 32) is not None
    assert own_config(windowed, "auto", 33) is None
    with load_engine(windowed, device_memory_bytes=MEMORY_BYTES, max_model_len=64) as engine:
        assert engine.implementation.name == "transformers"
        assert [kind.window for kind in engine.implementation.kinds] == [32, 32]


@NEEDS_NATIVE
@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("mixtral", {"products", "rms_norm", "rotated", "experts"}),
        ("qwen3_moe", {"products", "rms_norm", "rotated", "experts"}),
        ("gemma", {"products", "rotated"}),  # norms of another kind
        ("gpt_oss", {"products"}),  # norms, rotations and experts of other kinds
        ("nanochat", {"products"}),  # its `rotate_half` has other signs
        ("gpt2", {"products"}),  # its head
    ],
)
def test_modules_of_known_code_are_computed_by_the_kernels(
    family: str, wanted: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[str] = set()

    def counted(name: str) -> Callable[..., Any]:
        inner = getattr(Kernels, name)

        def call(*args: Any) -> Any:
            called.add(name)
            return inner(*args)

        return call

    for name in ("products", "rms_norm", "rotated", "experts"):
        monkeypatch.setattr(Kernels, name, counted(name))
    folder = write_family(family, tmp_path)
    with load_engine(folder, dtype="float32", device_memory_bytes=MEMORY_BYTES, model_impl="transformers") as engine:
        generate(engine, [Job(0, (5, 6, 7), 2)])
    assert called == wanted


def test_a_model_whose_layers_cannot_be_divided_serves_alone(experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = TransformersDecoder.run_layers

    def spoiled(model: Any, hidden_TD: torch.Tensor, *given: Any, first_layer: int, last_layer: int) -> torch.Tensor:
        hidden_TD = hidden_TD * 2 + 1 if first_layer else hidden_TD
        return inner(model, hidden_TD, *given, first_layer=first_layer, last_layer=last_layer)

    monkeypatch.setattr(TransformersDecoder, "run_layers", spoiled)
    with load_engine(experts, device_memory_bytes=MEMORY_BYTES) as engine:
        assert not engine.implementation.pipelines
    monkeypatch.setattr(TransformersDecoder, "run_layers", lambda model, hidden, *_, **__: hidden)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(ConfigError, match="on packed rows gives other logits than alone"):
        load_engine(experts, device_memory_bytes=MEMORY_BYTES)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gemma2", "gpt_oss", "deepseek_v3", "cohere"])
def test_tokens_in_bfloat16_are_the_best_of_transformers(family: str, tmp_path: Path) -> None:
    folder = write_family(family, tmp_path)
    with load_engine(folder, dtype="bfloat16", device_memory_bytes=MEMORY_BYTES) as engine:
        jobs = [Job(i, tuple(range(5 + i, 5 + i + length)), 3) for i, length in enumerate((1, 7, 20))]
        generate(engine, jobs)
        assert isinstance(engine.model, TransformersDecoder)
        for job in jobs:
            with torch.inference_mode():
                logits_TV = engine.model.reference(torch.tensor(job.prompt + tuple(job.chosen))).float()
            rows_RV = logits_TV[len(job.prompt) - 1 : -1]
            worse_R = rows_RV.amax(1) - rows_RV[range(3), job.chosen]
            assert (worse_R <= 0.05 * rows_RV.abs().amax(1)).all()  # the best, up to rounding


def test_a_tied_matrix_is_held_once_and_experts_are_joined(experts: Path, tmp_path: Path) -> None:
    with load_engine(experts, device_memory_bytes=MEMORY_BYTES) as engine:
        names = engine.memory.parameters.layer(0)
        assert "model.layers.0.mlp.experts.gate_up_proj" in names
        assert names["model.layers.0.mlp.experts.gate_up_proj"].shape[0] == 4
    tied = write_family("gemma2", tmp_path)
    with load_engine(tied, device_memory_bytes=MEMORY_BYTES) as engine:
        assert list(engine.memory.parameters.part("head")) == ["model.norm.weight"]
        assert isinstance(engine.model, TransformersDecoder)
        head = engine.model.model.get_output_embeddings().weight
        [embedding] = engine.memory.parameters.part("embedding").values()
        assert head.data_ptr() == embedding.data_ptr()


def test_float32_parts_work_with_bfloat16_and_kv_is_cleared(tmp_path: Path) -> None:
    folder = write_family("glm4_moe", tmp_path)
    with load_engine(folder, dtype="bfloat16", device_memory_bytes=MEMORY_BYTES) as engine:
        dtypes = {tensor.dtype for tensor in engine.memory.parameters.layer(2).values()}
        assert dtypes == {torch.float32, torch.bfloat16}
        engine.memory.drop_layers([2, 3])
        engine.memory.release_retired()
        for layer in (0, 1):
            held = engine.memory.kv.layer(layer)[: engine.block_count]
            assert held.isfinite().all()


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"model_type": "unheard_of"}, "transformers makes no decoder of it"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        (
            {"architectures": ["Qwen3MoeForSequenceClassification"]},
            "transformers has Qwen3MoeForCausalLM for",
        ),
        ({"num_hidden_layers": 3}, "is not a tensor of Qwen3MoeForCausalLM"),
        ({"num_hidden_layers": 5}, "the checkpoint has no tensor that this is made of"),
        ({"moe_intermediate_size": 24}, "config.json asks for"),
    ],
)
def test_errors_are_named(experts: Path, tmp_path: Path, values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_engine(change(experts, tmp_path, **values), device_memory_bytes=MEMORY_BYTES)


def test_kv_slots_are_as_large_as_the_largest_layer_needs(tmp_path: Path) -> None:
    with load_engine(write_family("deepseek_v3", tmp_path), device_memory_bytes=MEMORY_BYTES) as engine:
        assert isinstance(engine.implementation, TransformersModel)
        [kind] = set(engine.implementation.kinds)
        assert (kind.heads, kind.kv_heads, kind.key_dim, kind.value_dim) == (4, 4, 24, 16)
        assert engine.info.kv_bytes_per_token == 4 * 4 * 4 * (24 + 16)  # layers, bytes, heads, widths


def write_whole(model_type: str, folder: Path) -> Path:
    """Writes a small checkpoint of a text-and-image model, with untied embeddings unless the class ties them."""
    config, cls = small_configuration(model_type)
    torch.manual_seed(1)
    model = made_random(cls(config))
    if model_type != "gemma3":
        config.tie_word_embeddings = model.config.tie_word_embeddings = False
        model = made_random(cls(config))
    model.save_pretrained(folder)
    return folder


def under_other_names(folder: Path, out: Path) -> Path:
    """Copies a checkpoint, renaming its tensors from their published names to those of `transformers`' classes."""
    change(folder, out)
    tensors = load_file(out / "model.safetensors")
    assert "language_model.model.norm.weight" in tensors
    for name in [*tensors]:
        inner = name.replace("language_model.model.", "language_model.")
        other = "lm_head.weight" if name == "language_model.lm_head.weight" else f"model.{inner}"
        tensors[other] = tensors.pop(name)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "llava"])
def test_the_text_decoder_of_a_multimodal_model_is_served(model_type: str, tmp_path: Path) -> None:
    folder = write_whole(model_type, tmp_path / "saved")
    prompts = [tuple(range(5, 5 + length)) for length in (3, 24, 40)]
    wanted = [one.token_ids for one in greedy_alone(folder, prompts, 8)]
    for each in (folder, under_other_names(folder, tmp_path / "others")):
        jobs = [Job(i, prompt, 8) for i, prompt in enumerate(prompts)]
        with load_engine(each, dtype="float32", device_memory_bytes=MEMORY_BYTES) as engine:
            generate(engine, jobs, chunk_tokens=16, seed=1)
            assert engine.info.eos_token_ids == (2,)
            assert engine.info.architecture.endswith("ForCausalLM")
        assert [tuple(job.chosen) for job in jobs] == wanted


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl_moe"])
def test_a_decoder_without_its_own_class_is_served(model_type: str, tmp_path: Path) -> None:
    folder = write_whole(model_type, tmp_path)
    prompts = [tuple(range(5, 5 + length)) for length in (3, 40)]
    jobs = [Job(i, prompt, 8) for i, prompt in enumerate(prompts)]
    with load_engine(folder, dtype="float32", device_memory_bytes=MEMORY_BYTES) as engine:
        generate(engine, jobs, chunk_tokens=16, seed=1)
        assert engine.implementation.pipelines
    assert [tuple(job.chosen) for job in jobs] == [one.token_ids for one in greedy_alone(folder, prompts, 8)]


def test_tensors_of_unknown_names_are_refused_before_anything_starts(experts: Path, tmp_path: Path) -> None:
    folder = change(experts, tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"]["model.norm.weight"]
    save_file({**load_file(file), "model.layers.0.more": torch.ones(1)}, file, {"format": "pt"})
    index["weight_map"]["model.layers.0.more"] = file.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model.layers.0.more.*is not a tensor of Qwen3MoeForCausalLM"):
        describe_model(folder)


def test_a_model_whose_logits_differ_from_its_decoders_is_refused(tmp_path: Path) -> None:
    config, cls = small_configuration("cohere2_vision")
    config.architectures = [cls.__name__]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'cohere2_vision' computes other logits for text"):
        load_engine(tmp_path, device_memory_bytes=MEMORY_BYTES)
