"""The copy of the parameters that all workers of a host share: it is created once, is never visible incomplete, and is
removed by its last user.
"""

import errno
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from ballast.common.errors import ConfigError
from services.worker.memory.shared_copy import (
    Copied,
    Maker,
    SharedCopy,
    budget_of,
    copy_summed,
    open_copy,
    why_no_room,
)

SIZES = (300_000, 7, 1 << 20)


def tensors(seed: int = 0, scale: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 255, (size * scale,), dtype=torch.uint8, generator=generator) for size in SIZES]


def parts(seed: int = 0, scale: int = 1) -> list[Copied]:
    first, *rest = tensors(seed, scale)
    return [Copied("embedding", [first], b"\1" * 16), Copied("layers.0", rest, b"\2" * 16)]


def made(root: Path) -> SharedCopy:
    found = open_copy(root, "model")
    assert isinstance(found, Maker)
    with found as maker:
        copy = maker.make(parts())
    assert copy is not None
    return copy


def filled(copy: SharedCopy, name: str, like: list[torch.Tensor]) -> bool:
    blank = [torch.zeros_like(one) for one in like]
    if not copy.fill(name, blank):
        return False
    return all(torch.equal(one, other) for one, other in zip(blank, like, strict=True))


def test_the_second_worker_maps_the_copy_of_the_first(tmp_path: Path) -> None:
    first = made(tmp_path)
    second = open_copy(tmp_path, "model")
    assert isinstance(second, SharedCopy)
    assert second.parts["layers.0"].checksum == "02" * 16
    embedding, *layer = tensors()
    assert filled(second, "embedding", [embedding])
    assert filled(second, "layers.0", layer)
    assert not second.fill("layers.1", layer)
    assert not second.fill("layers.0", layer[:1]), "the shape differs"
    first.close()
    assert (tmp_path / "model/parameters.bin").exists()
    assert filled(second, "layers.0", layer)
    second.close()
    second.close()
    assert list(tmp_path.iterdir()) == [], "the last user must remove it"


def test_a_changed_byte_is_detected(tmp_path: Path) -> None:
    copy = made(tmp_path)
    with (tmp_path / "model/parameters.bin").open("r+b") as file:
        file.seek(SIZES[0] + 500_000)
        byte = file.read(1)
        file.seek(SIZES[0] + 500_000)
        file.write(bytes([byte[0] ^ 1]))
    embedding, *layer = tensors()
    assert filled(copy, "embedding", [embedding])
    assert not copy.fill("layers.0", [torch.zeros_like(one) for one in layer])
    copy.close()


def test_swapped_pieces_are_detected() -> None:
    source = tensors()[2]
    swapped = torch.cat([source[1 << 18 : 1 << 19], source[: 1 << 18], source[1 << 19 :]])
    target = torch.zeros_like(source)
    assert copy_summed(target, source) != copy_summed(target, swapped)


def test_after_a_failed_attempt_the_next_worker_may_create_the_copy(tmp_path: Path) -> None:
    found = open_copy(tmp_path, "model")
    assert isinstance(found, Maker)
    found.give_up()
    copy = made(tmp_path)
    copy.close()


def test_memory_is_released_if_the_host_is_full_before_the_copy_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_text(path: Path, text: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    found = open_copy(tmp_path, "model")
    assert isinstance(found, Maker)
    with found as maker:
        assert maker.make(parts()) is None
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["maker.lock"]


def _make_for_ever(root: Path) -> None:
    while True:
        found = open_copy(root, "model")
        if isinstance(found, Maker):
            with found as maker:
                copy = maker.make(parts(scale=8))
        else:
            copy = found
        assert copy is not None
        copy.close()


def test_killing_the_creator_leaves_no_incomplete_copy(tmp_path: Path) -> None:
    rng = random.Random(3)
    context = multiprocessing.get_context("fork")
    embedding, *layer = tensors(scale=8)
    for _ in range(20):
        maker = context.Process(target=_make_for_ever, args=(tmp_path,))
        maker.start()
        time.sleep(rng.uniform(0.0, 0.1))
        assert maker.pid is not None
        os.kill(maker.pid, signal.SIGKILL)
        maker.join()
        found = open_copy(tmp_path, "model")
        if isinstance(found, Maker):
            with found as again:
                copy = again.make(parts(scale=8))
        else:
            copy = found
        assert copy is not None
        assert filled(copy, "embedding", [embedding])
        assert filled(copy, "layers.0", layer)
        copy.close()
        assert list(tmp_path.iterdir()) == []


def test_available_room(tmp_path: Path) -> None:
    assert why_no_room(tmp_path / "not/there", 1000, None) == ""
    assert "--host-copy allows" in why_no_room(tmp_path, 1000, 999)
    assert "enlarge the container's /dev/shm" in why_no_room(tmp_path, 1 << 60, None)
    assert (budget_of("auto"), budget_of("77")) == (None, 77)
    with pytest.raises(ConfigError, match="host_copy"):
        budget_of("much")
