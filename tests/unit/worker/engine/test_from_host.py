"""Engines on one host share a copy of the parameters."""

from pathlib import Path

import pytest

from services.worker.engine.load import Engine, load_engine
from services.worker.memory import shared_copy
from tools.model.tiny import make_tiny

MEMORY_BYTES = 16 << 20


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_copy, "ROOT", tmp_path / "shared")
    return tmp_path / "shared"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")


def load(model: Path, host_copy: str = "auto", **changes: str) -> Engine:
    return load_engine(model, device_memory_bytes=MEMORY_BYTES, host_copy=host_copy, **changes)  # pyright: ignore[reportArgumentType]


def checksums(engine: Engine) -> list[bytes]:
    parameters = engine.memory.parameters
    layers = [parameters.layer_checksum(layer) for layer in range(parameters.layer_count)]
    return [*layers, *(parameters.part_checksum(name) for name in parameters.other_names)]


def test_the_second_engine_starts_from_the_copy_of_the_first(root: Path, model: Path) -> None:
    with load(model, "off") as plain:
        expected, known = checksums(plain), dict(plain.memory.parameters.loaded_checksums)
    assert not root.exists()
    with load(model) as first:
        (folder,) = root.iterdir()
        hidden = model / "model.safetensors"
        content = hidden.read_bytes()
        with load(model) as second:
            assert checksums(first) == checksums(second) == expected
            assert second.memory.parameters.loaded_checksums == known
            second.memory.drop_layers([1, 2])
            second.memory.make_room_for_layers([1, 2], block_count=0)
            hidden.write_bytes(b"")  # from now on, nothing may read the checkpoint
            assert second.holds_layer(1)
            assert second.read_layer(1)
            assert second.read_layer(2)
            assert checksums(second) == expected
        hidden.write_bytes(content)
        assert folder.exists()
    assert list(root.iterdir()) == []


def test_another_packing_gets_its_own_copy(root: Path, model: Path) -> None:
    with load(model, kernels="torch"), load(model, dtype="float64", kernels="torch"):
        assert len(list(root.iterdir())) == 2


def test_without_room_the_checkpoint_is_read(root: Path, model: Path) -> None:
    with load(model, "1000") as engine:
        assert not list(root.glob("*/parameters.bin"))
        assert engine.memory.parameters.loaded_checksums


def test_a_damaged_copy_is_not_used(root: Path, model: Path) -> None:
    with load(model, "off") as plain:
        expected = checksums(plain)
    with load(model):
        (copy,) = root.glob("*/parameters.bin")
        with copy.open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)
            file.seek(1000)
            file.write(bytes([byte[0] ^ 255]))
        with load(model) as second:
            assert checksums(second) == expected
