"""The kernels between a layer's matrix products, without a GPU. `interpreted_kernel` compares their results."""

import importlib

import pytest
import torch

from services.worker.engine.operations import activation_constants, norm_constants, rotation_constants
from tests.unit.worker.engine.compiled_kernel import SHARED_LIMIT_BYTES, TYPES, compiled, signatures
from tests.unit.worker.engine.interpreted_kernel import HEADS, compare_operations, model

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("capability", SHARED_LIMIT_BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_kernels_fit_into_registers(capability: int, dtype: torch.dtype) -> None:
    kernels = importlib.import_module("services.worker.engine.fused_kernels")
    norm, rotation, activation = signatures(dtype)
    variants = [(kernels.add_and_norm, norm, norm_constants(size, has_added=True)) for size in (896, 8192, 16384)]
    for head_dim, has_norm in ((64, False), (128, True), (256, True)):
        variants.append(
            (kernels.rotate_and_write, rotation, rotation_constants(32, 16, 8, head_dim, has_norm=has_norm))
        )
    variants.append((kernels.activate, activation, activation_constants(14336)))
    for kernel, given, constants in variants:
        done = compiled(kernel, given, constants, capability)
        which = f"{kernel.fn.__name__}, sm_{capability}, {constants}"
        assert done.spilled_bytes == 0, which
        assert done.registers <= 128, which  # so that several programs fit on an SM
        assert done.shared_bytes <= 16 << 10, which
        assert "v4" in done.ptx, which  # access is 16 bytes wide


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("dtype", TYPES)
def test_on_the_device_fused_kernels_equal_torch(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    compare_operations(model(heads, kv_heads, head_dim), dtype, torch.device("cuda"))
