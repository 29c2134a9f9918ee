"""KV in float8: it is as accurate as its 3 mantissa bits allow, takes half the memory of bfloat16, and is never mixed
with other KV.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ballast.common.errors import ConfigError
from ballast.service.settings import load_settings
from services.worker.config import WorkerSettings
from services.worker.core.batch import Slice
from services.worker.engine.choice import choose_model
from services.worker.engine.load import Engine, load_engine
from tests.support.engine import KERNELS, Job, forward, generate
from tests.support.families import write_family
from tests.unit.worker.engine.test_tensor_parallel import OneOf, Together
from tools.model.tiny import make_tiny

MEMORY_BYTES = 8 << 20
PROMPT = tuple(range(5, 65))
FP8 = "fp8_e4m3"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("model") / "tiny", layers=4, max_len=128)


def load(folder: Path, kv_cache_dtype: str = FP8, **options: Any) -> Engine:
    return load_engine(folder, device_memory_bytes=MEMORY_BYTES, kv_cache_dtype=kv_cache_dtype, **options)


def logits(engine: Engine, sizes: Sequence[int] = (len(PROMPT),)) -> torch.Tensor:
    """Logits of a prompt that is computed in chunks of these sizes."""
    table, done, found = range(-(-len(PROMPT) // engine.block_tokens)), 0, list[torch.Tensor]()
    for size in sizes:
        found += forward(engine, [Slice(0, done, PROMPT[done : done + size], True)], [tuple(table)])
        done += size
    return torch.cat(found)


def apart(folder: Path, **options: Any) -> float:
    """Root mean square of the change of the logits due to float8, relative to the logits' spread."""
    results: list[torch.Tensor] = []
    for name in ("auto", FP8):
        with load(folder, name, **options) as engine:
            results.append(logits(engine).double())
    return float((results[1] - results[0]).std() / results[0].std())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_near_those_of_exact_kv(kernels: str, dtype: str, tiny: Path) -> None:
    assert 1e-4 < apart(tiny, kernels=kernels, dtype=dtype) < 0.25


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "gemma2", "qwen3_moe"])
def test_transformers_models_with_kv_in_float8(family: str, tmp_path: Path) -> None:
    """The families have latent attention, attention sinks, soft caps and sliding windows, or experts."""
    assert 1e-4 < apart(write_family(family, tmp_path), dtype="float32") < 0.25


@pytest.mark.parametrize("kernels", KERNELS)
def test_chunks_of_a_prompt_change_nothing(kernels: str, tiny: Path) -> None:
    """A token attends to the rounded KV of its own chunk, just as to the KV of earlier chunks."""
    with load(tiny, kernels=kernels, dtype="float64") as engine:
        whole = logits(engine)
        for sizes in ((1,) * 60, (20, 40), (7, 1, 52)):
            torch.testing.assert_close(logits(engine, sizes), whole, rtol=0, atol=1e-9)


def test_twice_as_many_tokens_fit_as_in_bfloat16(tiny: Path) -> None:
    with load(tiny, "auto", dtype="bfloat16") as wide, load(tiny, dtype="bfloat16") as narrow:
        assert narrow.info.dtype == wide.info.dtype == "bfloat16"
        assert narrow.info.kv_bytes_per_token * 2 == wide.info.kv_bytes_per_token
        assert narrow.info.block_bytes * 2 == wide.info.block_bytes
        assert narrow.block_count >= 2 * wide.block_count
        assert narrow.info.layer_parameter_bytes == wide.info.layer_parameter_bytes
        assert "kv_cache_dtype" in narrow.info.differences(wide.info)  # so that they never form a group


def test_ranks_generate_the_tokens_of_one(tiny: Path) -> None:
    def answers(engine: Engine) -> list[list[int]]:
        jobs = [Job(i, tuple(range(5 + i, 9 + 7 * i)), 12) for i in range(4)]
        with engine:
            generate(engine, jobs, chunk_tokens=16)
        return [job.chosen for job in jobs]

    together = Together(2)

    def one(rank: int) -> list[list[int]]:
        return answers(load(tiny, dtype="float64", peers=OneOf(together, rank)))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(one, range(2))) == [answers(load(tiny, dtype="float64"))] * 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "'fp8_e5m2' is not supported; use one of auto, fp8, fp8_e4m3"),
        ({"device": "cuda", "attention_backend": "flashinfer"}, "FlashInfer has not been tried with it"),
    ],
)
def test_unsupported_settings_are_refused_before_loading(options: dict[str, str], why: str, tiny: Path) -> None:
    given = {"model_impl": "auto", "dtype": "auto", "device": "cpu", "kernels": "torch", "kv_cache_dtype": FP8}
    with pytest.raises(ConfigError, match=why):
        choose_model(tiny, **(given | options))  # pyright: ignore[reportArgumentType]


def test_impossible_settings_are_refused_before_a_process_starts() -> None:
    given = ["--model", "m", "--kv-cache-dtype", FP8, "--attention-backend", "flashinfer"]
    with pytest.raises(ConfigError, match="not with FlashInfer"):
        load_settings(WorkerSettings, given, {})
    assert load_settings(WorkerSettings, given[:4], {}).kv_cache_dtype == FP8


def test_vllms_short_name_means_the_same(tiny: Path) -> None:
    with load(tiny, "fp8") as short, load(tiny) as long:
        assert short.info == long.info
        assert torch.equal(logits(short), logits(long))
    assert load_settings(WorkerSettings, ["--model", "m", "--kv-cache-dtype", "fp8"], {}).kv_cache_dtype == "fp8"


def with_scales(folder: Path, out: Path, scales: Mapping[str, float | Sequence[float]]) -> Path:
    """Copies a checkpoint and adds these scales to every layer."""
    shutil.copytree(folder, out)
    layers: int = json.loads((out / "config.json").read_text())["num_hidden_layers"]
    tensors = {f"model.layers.{i}.self_attn.{n}": torch.tensor(s) for i in range(layers) for n, s in scales.items()}
    save_file(tensors, out / "scales.safetensors", {"format": "pt"})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "scales.safetensors")
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


@pytest.mark.parametrize("kernels", KERNELS)
def test_scales_of_the_checkpoint_are_used_whatever_their_names(kernels: str, tmp_path: Path) -> None:
    folder = write_family("llama:fp8 channels", tmp_path)

    def scaled(name: str, **scales: float | Sequence[float]) -> Path:
        return with_scales(folder, tmp_path / name, {key.replace("__", "."): scale for key, scale in scales.items()})

    def found(folder: Path, kv_cache_dtype: str = FP8) -> torch.Tensor:
        with load(folder, kv_cache_dtype, dtype="float32", kernels=kernels) as engine:
            return logits(engine)

    exact, plain, small = found(folder, "auto"), found(folder), scaled("vllm", k_scale=2.0**-5, v_scale=2.0**-6)
    ours = found(small)
    assert not torch.equal(ours, plain)  # with other scales, other values become subnormal
    assert (ours - exact).std() < 0.25 * exact.std()
    for number, folders in enumerate(
        [
            scaled("autofp8", k_proj__k_scale=[2.0**-5], v_proj__v_scale=[2.0**-6]),
            scaled("compressed", k_proj__output_scale=[2.0**-5, 2.0**-7], v_proj__output_scale=2.0**-6),
        ]
    ):
        assert torch.equal(found(folders), ours), number
    assert torch.equal(found(scaled("both", kv_scale=2.0**-5)), found(scaled("each", k_scale=2.0**-5, v_scale=2.0**-5)))
    assert torch.equal(found(scaled("none", k_scale=0.0, v_scale=-1.0)), plain)
    assert torch.equal(found(small, "auto"), exact)
    with pytest.raises(ConfigError, match="on packed rows gives other logits"):  # all values round to zero
        found(scaled("wrong", v_scale=2.0**14))


def test_scales_of_latent_kv_are_ignored(tmp_path: Path) -> None:
    folder = write_family("deepseek_v3:fp8", tmp_path)
    with load(folder, dtype="float32") as engine:
        plain = logits(engine)
    with load(with_scales(folder, tmp_path / "scaled", {"k_scale": 0.5, "v_scale": 0.5}), dtype="float32") as engine:
        assert torch.equal(logits(engine), plain)
