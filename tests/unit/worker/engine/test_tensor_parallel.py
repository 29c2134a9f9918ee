"""The ranks of one instance compute their shares together. Here the ranks are threads."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ballast.common.errors import ConfigError
from services.worker.engine.load import Engine, load_engine
from tests.support.engine import Job, generate
from tests.support.peers import OneOf, Together
from tools.model.tiny import make_tiny

MEMORY_BYTES = 4 << 20


def with_all_biases(model_dir: Path) -> Path:
    """Adds a bias to every projection, as Llama's configuration allows."""
    config = json.loads((model_dir / "config.json").read_text())
    config |= {"attention_bias": True, "mlp_bias": True}
    (model_dir / "config.json").write_text(json.dumps(config))
    tensors = load_file(model_dir / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        bias = torch.randn(tensors[name].shape[0], generator=generator) * 0.1
        tensors[name.removesuffix("weight") + "bias"] = bias.to(tensors[name].dtype)
    save_file(tensors, model_dir / "model.safetensors")
    return model_dir


@pytest.mark.parametrize("arch", ["llama", "llama with biases", "qwen2", "qwen3"])
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_generate_the_tokens_of_one(arch: str, count: int, tmp_path: Path) -> None:
    model_dir = make_tiny(arch.split()[0], tmp_path / "tiny", layers=2, kv_heads=4, intermediate=176, max_len=64)
    if arch == "llama with biases":
        with_all_biases(model_dir)

    def answers(engine: Engine) -> list[list[int]]:
        jobs = [Job(i, tuple(range(5 + i, 9 + 7 * i)), 12) for i in range(4)]
        with engine:
            generate(engine, jobs, chunk_tokens=16)
        return [job.chosen for job in jobs]

    together = Together(count)

    def one(rank: int) -> list[list[int]]:
        peers = OneOf(together, rank)
        return answers(load_engine(model_dir, device_memory_bytes=MEMORY_BYTES, dtype="float64", peers=peers))

    alone = answers(load_engine(model_dir, device_memory_bytes=MEMORY_BYTES, dtype="float64"))
    with ThreadPoolExecutor(count) as threads:
        assert list(threads.map(one, range(count))) == [alone] * count


def test_reported_facts_cover_all_ranks(tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path / "tiny", layers=2)

    def info(peers: OneOf | None = None) -> tuple[int, int, int, int]:
        with load_engine(model_dir, device_memory_bytes=MEMORY_BYTES, dtype="float64", peers=peers) as engine:
            told = engine.info
            assert engine.block_count * told.block_bytes * 2 <= MEMORY_BYTES * told.tensor_parallel_size
            return told.parameter_count, told.kv_bytes_per_token, told.block_bytes, told.tensor_parallel_size

    alone, one_of_two = info(), info(OneOf(Together(2), 1))
    assert one_of_two[:3] == alone[:3]
    assert (alone[3], one_of_two[3]) == (1, 2)


@pytest.mark.parametrize(
    ("shape", "count", "why"),
    [
        ((2, 176), 3, "3 does not divide the model's 4 attention heads"),
        ((2, 176), 4, "4 does not divide the model's 2 KV heads"),
        ((4, 170), 4, "4 does not divide the model's 170 rows of the MLP"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    shape: tuple[int, int], count: int, why: str, tmp_path: Path
) -> None:
    kv_heads, inner = shape
    model_dir = make_tiny("llama", tmp_path / "tiny", layers=1, kv_heads=kv_heads, intermediate=inner)
    with pytest.raises(ConfigError, match=why):
        load_engine(model_dir, device_memory_bytes=MEMORY_BYTES, peers=OneOf(Together(count), 0))


def test_the_compiled_kernels_are_refused_for_several_ranks(tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path / "tiny", layers=1)
    with pytest.raises(ConfigError, match="a sum over ranks"):
        load_engine(model_dir, device_memory_bytes=MEMORY_BYTES, kernels="native", peers=OneOf(Together(2), 0))
