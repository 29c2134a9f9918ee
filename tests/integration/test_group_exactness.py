"""However the layout changes, every token equals the one that an undisturbed worker generates (I2).

`make test-exactness` runs many more histories: BALLAST_EXACTNESS_HISTORIES sets how many, and
BALLAST_EXACTNESS_KV_CACHE_DTYPE=fp8_e4m3 runs them with float8 KV.
"""

import asyncio
import functools
import gc
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import fake_driver
from tests.support.adapters import merged, write_adapter
from tests.support.exactness import Expected, History, Tally, undisturbed
from tests.support.group import HERE, ONE_GPU, Place
from tests.support.wishes import Wish, make_wishes
from tools.model.tiny import make_tiny

HISTORIES = int(os.environ.get("BALLAST_EXACTNESS_HISTORIES", "42"))
FIRST_SEED = int(os.environ.get("BALLAST_EXACTNESS_FIRST_SEED", "0"))
PLACE = replace(HERE, kv_cache_dtype=os.environ.get("BALLAST_EXACTNESS_KV_CACHE_DTYPE", HERE.kv_cache_dtype))
REQUESTS = 50
BLOCK = 14  # histories per test, enough that together they cover every kind of event
LAYERS = (4, 7, 5)
CROWDED_BYTES = {4: 10 << 19, 5: 12 << 19, 7: 16 << 19}  # by layer count: more KV than half the parameters
CROWDED = 5  # every fifth history is crowded
WAVES_FIRST_SEED = 100_002  # crowded, with separate seeds: in half of them a drop lacks room for all KV at once
WAVES_HISTORIES = 20

OVER_A_DRIVER = (3, 4)
WITH_ADAPTERS = range(0, 12, 3)  # these seeds use models of the same depth; one of them swaps
ON_A_GPU = range(8)  # seeds; two of them swap

Known = tuple[Path, list[Wish], list[Expected]]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Known]:
    """Per layer count: a checkpoint, requests, and the answers of an undisturbed worker."""

    @functools.cache
    def get(layers: int) -> Known:
        model_dir = make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=layers, max_len=256)
        wishes = make_wishes(150, layers)
        return model_dir, wishes, asyncio.run(undisturbed(model_dir, wishes, PLACE))

    return get


@pytest.mark.rotating
@pytest.mark.timeout(60 + 60 * BLOCK)
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + HISTORIES, BLOCK))
def test_no_token_changes_whatever_happens_to_the_layout(first: int, known: Callable[[int], Known]) -> None:
    seeds = range(first, min(first + BLOCK, FIRST_SEED + HISTORIES))
    tally = Tally()
    for seed in seeds:
        try:
            tally.add(_run(seed, known))
        except BaseException as error:
            error.add_note(f"seed {seed}: BALLAST_EXACTNESS_FIRST_SEED={seed} BALLAST_EXACTNESS_HISTORIES=1")
            raise
    print(f"\n{tally}")
    assert tally.requests == len(seeds) * REQUESTS
    if len(seeds) == BLOCK:
        _check_that_it_has_seen_what_it_is_about(tally)


@pytest.mark.timeout(60 + 60 * WAVES_HISTORIES)
def test_no_token_changes_where_victims_wait_for_room(known: Callable[[int], Known]) -> None:
    """Runs histories until one has victims that wait for room, since that depends on the machine's speed, too."""
    seeds = range(WAVES_FIRST_SEED, WAVES_FIRST_SEED + CROWDED * WAVES_HISTORIES, CROWDED)
    assert any(_run(seed, known).later_waves for seed in seeds)


def test_no_token_changes_over_the_calls_of_the_cuda_driver(known: Callable[[int], Known]) -> None:
    """Drops, aborts and restores through `memory.cuda` and its real bindings, with a fake driver in host memory."""
    driver = fake_driver.load()
    driver.set_granularity(16 << 10)
    driver.fail_at(None)
    tally = Tally()
    for seed in OVER_A_DRIVER:
        tally.add(_run(seed, known, replace(PLACE, backend=fake_driver.open_fake)))
        assert driver.violation == ""
        assert driver.counts == (0, 0, 0, 0)
    assert min(tally.drops, tally.restores, tally.aborts) > 0


@pytest.mark.rotating
@pytest.mark.timeout(600)
def test_no_token_changes_with_adapters(tmp_path: Path) -> None:
    """The tokens must be those of dense models with merged adapters; a third of the requests uses no adapter."""
    model_dir = make_tiny("llama", tmp_path / "tiny", layers=LAYERS[0], max_len=256)
    adapters = {
        "attention": write_adapter(tmp_path / "attention", model_dir, rank=2, targets=("q_proj", "v_proj")),
        "all": write_adapter(tmp_path / "all", model_dir, rank=5, seed=2),
    }
    wishes, expected, tally = make_wishes(150, 1), list[Expected](), Tally()
    models = {name: merged(tmp_path / f"{name}-merged", model_dir, folder) for name, folder in adapters.items()}
    answers = [asyncio.run(undisturbed(folder, wishes)) for folder in (model_dir, *models.values())]
    for index, wish in enumerate(wishes):
        which = index % 3
        expected.append(answers[which][index])
        wishes[index] = replace(wish, sampling=replace(wish.sampling, adapter=("", *adapters)[which]))
    for seed in WITH_ADAPTERS:
        tally.add(_run(seed, lambda _: (model_dir, wishes, expected), Place(adapters=adapters)))
    still = History(1, model_dir, wishes, expected, REQUESTS, layouts_change=False, place=Place(adapters=adapters))
    tally.add(asyncio.run(still.run()))
    print(f"\n{tally}")
    assert min(tally.drops, tally.restores, tally.victims, tally.moved, tally.migrated, tally.exchanged_bytes) > 0


@pytest.mark.timeout(600)
def test_no_token_changes_with_kv_in_float8(tmp_path: Path) -> None:
    """The tokens must be those of a single worker with float8 KV, many of which differ from those with float64 KV."""
    model_dir = make_tiny("llama", tmp_path / "tiny", layers=LAYERS[0], max_len=256)
    wishes, place, tally = make_wishes(150, 1), Place(kv_cache_dtype="fp8_e4m3"), Tally()
    expected, exact = (asyncio.run(undisturbed(model_dir, wishes, each)) for each in (place, HERE))
    assert sum(one.token_ids != other.token_ids for one, other in zip(expected, exact, strict=True)) > 10
    for seed in WITH_ADAPTERS:
        tally.add(_run(seed, lambda _: (model_dir, wishes, expected), place))
    still = History(1, model_dir, wishes, expected, REQUESTS, layouts_change=False, place=place)
    tally.add(asyncio.run(still.run()))
    print(f"\n{tally}")
    assert min(tally.drops, tally.restores, tally.victims, tally.moved, tally.migrated, tally.exchanged_bytes) > 0


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_no_token_changes_on_a_gpu(tmp_path: Path) -> None:
    """Drops, exchanges, aborts, restores, migrations and swaps of two to four workers that share a GPU, in float32.

    The expected tokens are computed by a single worker on the same GPU. A matmul may round differently in another
    batch, so a token that differs at a near-tie is not an error; the answer's story contains its position.
    """
    tally = Tally()
    for layers in LAYERS[:2]:
        model_dir = make_tiny("llama", tmp_path / f"tiny-{layers}", layers=layers, max_len=256)
        wishes = make_wishes(150, layers)
        expected = asyncio.run(undisturbed(model_dir, wishes, ONE_GPU))
        for seed in (seed for seed in ON_A_GPU if LAYERS[seed % len(LAYERS)] == layers):
            tally.add(_run(seed, lambda _, made=(model_dir, wishes, expected): made, ONE_GPU))
    print(f"\n{tally}")
    assert min(tally.drops, tally.restores, tally.victims, tally.moved, tally.exchanged_bytes) > 0


def _run(seed: int, known: Callable[[int], Known], place: Place = PLACE) -> Tally:
    model_dir, wishes, expected = known(LAYERS[seed % len(LAYERS)])
    gc.collect()
    gc.disable()  # descriptors must be closed explicitly, not by the collector
    try:
        threads, descriptors = set(threading.enumerate()), _descriptors()
        crowded_bytes = CROWDED_BYTES[LAYERS[seed % len(LAYERS)]] if seed % CROWDED == 2 else 0
        history = History(seed, model_dir, wishes, expected, REQUESTS, crowded_bytes=crowded_bytes, place=place)
        asyncio.run(history.run())
        assert set(threading.enumerate()) <= threads
        assert _descriptors() <= descriptors  # fewer, if an earlier test's are closed only now
    finally:
        gc.enable()
    assert history.tally.requests == REQUESTS
    return history.tally


def _check_that_it_has_seen_what_it_is_about(tally: Tally) -> None:
    assert tally.whole > tally.requests * 0.5
    assert tally.unprepared <= 1 + (tally.drops + tally.restores) // 20
    assert min(tally.drops, tally.restores, tally.aborts, tally.victims, tally.moved, tally.exchanged_bytes) > 0
    assert min(tally.by_tokens, tally.sharing) > 0
    assert tally.steps_ahead > tally.requests // 20  # the slower the machine, the fewer steps run between two changes


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
