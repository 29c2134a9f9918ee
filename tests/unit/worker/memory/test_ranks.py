"""The memory of an instance whose ranks are processes, each on a device of `tests.support.fake_driver`.

BALLAST_DRIVER_HISTORIES sets the number of random changes.
"""

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from ballast.common.errors import ConfigError
from services.worker.engine.load import load_engine
from services.worker.memory.cuda import CudaError
from services.worker.ranks.__main__ import _remap
from services.worker.ranks.channel import Done, MemoryRefused, RankLog, RankLost, Remap, RemapRefused
from services.worker.ranks.load import Ranked, load_ranked, open_mirrors
from services.worker.ranks.memory import RankedMemory
from tests.support.fake_driver import FakeDriver, load, load_share, open_fake
from tests.support.families import write_family
from tests.unit.worker.memory.models import EXTENT_BYTES, books, possible
from tools.model.tiny import make_tiny

CHANGES = int(os.environ.get("BALLAST_DRIVER_HISTORIES", "250"))
RANKS = 2
LAYERS = 4


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    driver = load()
    driver.set_granularity(EXTENT_BYTES)
    driver.fail_at(None)
    yield driver
    driver.fail_at(None)
    driver.set_peers(True)
    assert driver.violation == ""
    assert driver.counts == (0, 0, 0, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, max_len=64)


def open_ranks(model: Path) -> Ranked:
    share = partial(load_share, model, device_memory_bytes=3 << 19, dtype="float64", extent_bytes=EXTENT_BYTES)
    return load_ranked(share, ["cpu"] * RANKS, RankLog())


def test_a_layer_of_experts_is_restored_on_all_ranks(driver: FakeDriver, tmp_path: Path) -> None:
    folder = write_family("qwen3_moe", tmp_path)
    share = partial(load_share, folder, device_memory_bytes=8 << 20, dtype="float64", extent_bytes=EXTENT_BYTES)
    ranked = load_ranked(share, ["cpu"] * RANKS, RankLog())
    memory = ranked.engine.memory
    assert memory.kv.mirrors
    wanted = memory.parameters.loaded_checksums[2]
    assert memory.parameters.layer_checksum(2) == wanted
    memory.drop_layers([2])
    memory.release_retired()
    memory.make_room_for_layers([2], block_count=1)
    ranked.engine.read_layer(2)
    assert memory.parameters.layer_checksum(2) == wanted
    ranked.engine.close()
    ranked.crew.close()


def test_random_changes_with_calls_that_are_refused_in_any_rank(driver: FakeDriver, model: Path) -> None:
    """If any rank's driver refuses a change, no rank's mappings, books or bytes have changed."""
    ranked, rng = open_ranks(model), random.Random(11)
    memory = ranked.engine.memory
    assert isinstance(memory, RankedMemory)
    checksums = [memory.parameters.layer_checksum(layer) for layer in range(LAYERS)]
    assert checksums == list(memory.parameters.loaded_checksums.values())  # the mappings hold what the ranks loaded
    refused = {CudaError: 0, RemapRefused: 0}
    for _ in range(CHANGES):
        before, held = [books(one) for one in (memory, *memory._mirrors)], set(memory.parameters.held_layers)
        here, there = rng.choice([(None, None), (rng.randrange(60), None), (None, rng.randrange(30))])
        driver.fail_at(here, unmaps=True)
        ask(ranked, "fail_at", there)
        change = possible(memory, rng)
        try:
            change()
        except (CudaError, RemapRefused) as error:
            refused[type(error)] += 1
            assert [books(one) for one in (memory, *memory._mirrors)] == before
        driver.fail_at(None)
        ask(ranked, "fail_at", None)
        memory.check()
        compare(ranked, driver)
        for layer in memory.parameters.held_layers:
            if layer not in held:
                ranked.engine.read_layer(layer)
            assert memory.parameters.layer_checksum(layer) == checksums[layer]
    print(f"\n{CHANGES} changes; refused here {refused[CudaError]}, by the other rank {refused[RemapRefused]}")
    assert min(refused.values()) > CHANGES // 20

    [rank] = [each for each in psutil.Process().children() if "services.worker.ranks" in each.cmdline()]
    rank.kill()
    rank.wait()
    with pytest.raises(RankLost):
        possible(memory, rng)()
    ranked.engine.close()  # the fixture checks what the driver still holds


def test_all_ranks_release_their_memory_when_parked_and_none_has_any_if_one_cannot_wake(
    driver: FakeDriver, model: Path
) -> None:
    ranked = open_ranks(model)
    memory, report = ranked.engine.memory, ranked.engine.memory.report()
    assert memory.can_park
    checksums = [memory.parameters.layer_checksum(layer) for layer in range(LAYERS)]
    for layer in range(LAYERS):
        ranked.engine.keep_layer(layer)
    for fails_here, fails_there in ((None, None), (None, 0), (0, None), (None, 3), (3, None)):
        memory.drop_layers([1])
        memory.release_retired()
        memory.park()
        memory.check()
        kept = memory.pool.extent_count - memory.pool.free_count
        assert driver.counts[0] == RANKS * kept, "rank 0 has no handle of free extents, its own or the other rank's"
        assert ask(ranked, "said")[1][0] == kept
        if fails_here is not None or fails_there is not None:
            driver.fail_at(fails_here)
            ask(ranked, "fail_at", fails_there)
            with pytest.raises(ConfigError, match="device_memory_bytes"):
                memory.unpark()
            driver.fail_at(None)
            ask(ranked, "fail_at", None)
            assert (driver.counts[0], ask(ranked, "said")[1][0]) == (RANKS * kept, kept)
        memory.unpark()
        memory.make_room_for_layers(range(LAYERS), block_count=0)
        for layer in range(LAYERS):
            assert ranked.engine.read_layer(layer)
        memory.open_window()
        memory.close_leaving()
        memory.check()
        compare(ranked, driver)
        assert memory.report() == report
        assert [memory.parameters.layer_checksum(layer) for layer in range(LAYERS)] == checksums
    ranked.engine.close()
    ranked.crew.close()


def test_a_rank_undoes_the_refused_change_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load_engine(model, device_memory_bytes=8 << 20, dtype="float64") as engine:
        assert _remap(engine.memory, Remap("empty", (), {})) == Done(None)

        def refuse() -> None:
            raise CudaError("cuMemRelease", "refused")

        monkeypatch.setattr(engine.memory.pool, "give_up_free", refuse)
        assert isinstance(_remap(engine.memory, Remap("give_up", (), {})), MemoryRefused)
        _remap(engine.memory, Remap("undo", (), {}))
        assert engine.memory.parameters.held_layers == ()


def ask(ranked: Ranked, name: str, *arguments: object) -> Any:
    """Calls a method of the other rank's driver and returns the result."""
    ranked.crew.tell(Remap(name, arguments, {}))
    [answer] = ranked.crew.answers().values()
    assert isinstance(answer, Done)
    return answer.result


def compare(ranked: Ranked, driver: FakeDriver) -> None:
    """Checks that both ranks have mapped what the books list, and that the other rank's driver agrees with its mirror
    in this process.
    """
    memory = ranked.engine.memory
    assert isinstance(memory, RankedMemory)
    mapped = memory.pool.extent_count - memory.pool.free_count
    reservations = len(memory.pool._reserved)
    assert driver.violation == ""
    assert driver.counts == (RANKS * memory.pool.extent_count, RANKS * reservations, RANKS * mapped, 0)
    assert ask(ranked, "said") == ("", (memory.pool.extent_count, reservations, mapped, 0))


def test_devices_without_peer_access_take_part_in_no_drop(driver: FakeDriver, model: Path) -> None:
    other = open_fake(1)
    other.create(EXTENT_BYTES, (4 << 20) // EXTENT_BYTES)
    driver.set_peers(False)
    with pytest.raises(ConfigError, match="device cuda:0: has no access to the memory of cuda:1"):
        open_fake(0).beside(other.export(0, 1))
    with load_engine(model, device_memory_bytes=4 << 20, dtype="float64", backend=open_fake(0)) as engine:
        assert open_mirrors(engine, [iter(other.export(0, 1))]) == []
        driver.set_peers(True)
        [mirror] = open_mirrors(engine, [iter(other.export(0, 1 << 20))])
        mirror.close()
    other.close()
