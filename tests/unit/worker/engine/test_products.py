"""Matrix products whose results do not depend on the batch, without a GPU."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from ballast.common.errors import ConfigError
from services.worker.engine.choice import choose_model
from services.worker.engine.implementation import BallastModel
from services.worker.engine.load import load_engine
from services.worker.engine.model import Model
from services.worker.engine.peers import Apart
from services.worker.engine.products import InvariantProducts, product_constants
from tests.unit.worker.engine.compiled_kernel import SHARED_LIMIT_BYTES, TYPES, compiled

pytest.importorskip("triton")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("capability", SHARED_LIMIT_BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "size"), [(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)])
def test_the_product_fits_into_registers_and_shared_memory(
    capability: int, dtype: torch.dtype, outputs: int, size: int
) -> None:
    kind = f"*{TYPES[dtype]}"
    given: dict[str, str] = dict.fromkeys(("out_ptr", "x_ptr", "weight_ptr", "bias_ptr"), kind)
    given |= dict.fromkeys(("rows", "out_row_stride", "x_row_stride", "weight_row_stride"), "i32")
    kernel = importlib.import_module("services.worker.engine.invariant_kernel").multiply
    done = compiled(kernel, given, product_constants(outputs, size, dtype, has_bias=False), capability)
    newer = tuple(int(n) for n in version("triton").split(".")[:2]) >= (3, 8)
    assert done.spilled_bytes <= (32 if newer and dtype == torch.float32 and capability == 90 else 0)
    assert done.registers <= 128
    assert 2 * done.shared_bytes <= SHARED_LIMIT_BYTES[capability]  # so that two programs fit on an SM
    assert dtype == torch.float32 or "mma" in done.ptx


def test_a_row_gives_the_same_bits_in_any_batch_size() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.worker.engine.interpreted_products"]
    subprocess.run(command, check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=300)


def chosen(model_dir: Path, device: str, **given: object) -> BallastModel:
    # `choose_model` checks the combination of settings.
    made, _ = choose_model(
        model_dir,
        dtype="float32",
        device=device,
        kernels="torch",
        batch_invariant=True,
        **({"model_impl": "auto"} | given),  # pyright: ignore[reportArgumentType]
    )
    assert isinstance(made, BallastModel)
    return made


def test_a_gpu_uses_the_product_and_a_cpu_need_not(model_dir: Path) -> None:
    assert chosen(model_dir, "cuda").batch_invariant
    assert not chosen(model_dir, "cpu").batch_invariant


def test_the_model_uses_the_product(model_dir: Path) -> None:
    with load_engine(model_dir, device_memory_bytes=8 << 20, kernels="torch") as engine:
        assert isinstance(engine.implementation, BallastModel)
        model, _ = replace(engine.implementation, batch_invariant=True).assemble(engine.memory, None, 64)
        assert isinstance(model, Model)
        assert isinstance(model._linear, InvariantProducts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_backend": "flashinfer"}, "FlashInfer"),
        ({"adapted": True}, "LoRA"),
        ({"peers": Apart(0, 2)}, "sums over ranks"),
    ],
)
def test_batch_invariance_is_refused_with_settings_that_depend_on_the_batch(
    model_dir: Path, given: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(model_dir, "cuda", **given)
