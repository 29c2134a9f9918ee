"""Loading a `transformers` model needs host memory for the model, one more layer, and a constant."""

import threading
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.engine.load import load_engine
from tests.support.quantised import DENSE, quantise

pytestmark = [pytest.mark.golden]

LAYERS, EXPERTS, HIDDEN, INNER = 8, 16, 256, 512
LAYER_BYTES = 4 * EXPERTS * 3 * HIDDEN * INNER
SLACK_BYTES = 96 << 20  # copies made when joining experts, and allocator overhead; the model is about twice as large
_STATUS = Path("/proc/self/status")


def held_bytes() -> int:
    """Anonymous and shared resident memory of this process, without file-backed pages."""
    told = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return sum(int(told[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


@contextmanager
def watched(most: list[int]) -> Generator[None]:
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], held_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.rotating
@pytest.mark.parametrize("form", ["", "fp8 channels", "int8", "w4a16"])
@pytest.mark.skipif(not _STATUS.exists(), reason="needs /proc/self/status")
def test_loading_needs_hardly_more_memory_than_the_model_and_its_largest_layer(form: str, tmp_path: Path) -> None:
    """Measured in a new process, whose allocator has retained no memory from earlier tests."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        beside = process.submit(bytes_beside_the_model, tmp_path, form).result(timeout=120)
    assert beside < LAYER_BYTES + SLACK_BYTES, f"{beside >> 20} MiB besides the model, layer: {LAYER_BYTES >> 20}"


def bytes_beside_the_model(path: Path, form: str) -> int:
    """Peak memory, in bytes, that this process needs in addition to the model while loading it. The model is written to
    `path`.
    """
    path = path / DENSE
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

    made: Any = Qwen3MoeConfig
    config = made(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path, max_shard_size="20MB")
    del model
    if form:
        path = quantise(path, path.with_name("quantised"), form)
    budget = LAYERS * LAYER_BYTES * 5 // 4
    with load_engine(path, device_memory_bytes=budget) as engine:  # warms up torch's allocators
        parameter_bytes = engine.memory_report().parameter_bytes
    budget = parameter_bytes * 5 // 4  # KV memory of non-fp32 parameters is zeroed and therefore resident
    before, most = held_bytes(), [0]
    with watched(most), load_engine(path, device_memory_bytes=budget) as engine:
        assert engine.implementation.name == "transformers"
        assert parameter_bytes > LAYERS * LAYER_BYTES / (1 if not form else 8)
    return most[0] - before - parameter_bytes
