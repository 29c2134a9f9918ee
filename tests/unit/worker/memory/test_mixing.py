"""The checksum that a GPU computes detects changes, and a CPU computes the same one."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.memory import mixing
from services.worker.memory.mixing import constants, mixed
from tests.unit.worker.engine.compiled_kernel import compiled

SIZES = (0, 2, 8, 14, 8192, 65536 + 8, 300_006)


def compare(device: str) -> None:
    """Checks that the kernel's sums equal those of the host."""
    for size in SIZES:
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        words = data[: size // 8 * 8].view(torch.int64)
        low, high = mixing._sums_on_device(words.to(device))
        mask = (1 << 64) - 1
        wanted = mixing._sums_on_host(words)
        assert (low & mask, high & mask) == (wanted[0] & mask, wanted[1] & mask), size


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=300_000), st.data())
def test_the_checksum_detects_wrong_missing_and_moved_bytes(content: bytes, data: st.DataObject) -> None:
    said = mixed(as_tensor(content))
    assert said == mixed(as_tensor(content))
    if len(set(content)) < 2:
        return
    at = data.draw(st.integers(0, len(content) - 1))
    wrong = bytearray(content)
    wrong[at] ^= data.draw(st.integers(1, 255))
    other = next(i for i in range(len(content)) if content[i] != content[at])
    swapped = bytearray(content)
    swapped[at], swapped[other] = content[other], content[at]
    sums = [mixed(as_tensor(bytes(each))) for each in (wrong, swapped)]
    assert said not in sums


def as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def test_the_checksum_is_stable_across_versions() -> None:
    """Workers of different versions compare their checksums."""
    assert mixed(torch.arange(1003, dtype=torch.int64).to(torch.uint8)).hex() == "cbdf717b366469d79d5b2c9ed1000ebe"


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_fits_into_registers(capability: int, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = importlib.import_module("services.worker.memory.kernels").mix_words
    for count in ("i32", "i64"):
        done = compiled(kernel, {"sums_ptr": "*u64", "words_ptr": "*u64", "count": count}, constants(), capability)
        assert done.spilled_bytes == 0
        assert done.registers <= 80


def test_the_interpreted_checksum_equals_the_hosts() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import compare; compare('cpu')"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_on_the_device_the_checksum_equals_the_hosts() -> None:
    compare("cuda")
    data = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8)
    assert mixed(data.to("cuda")) == mixed(data)
