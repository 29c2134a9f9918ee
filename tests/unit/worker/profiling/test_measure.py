"""Measures a tiny model: every kind of stage, a fit, a file, and a worker that starts with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ballast.common.cost import Chunk
from ballast.common.errors import ConfigError
from ballast.service.settings import build
from services.worker.__main__ import load_costs
from services.worker.config import WorkerSettings
from services.worker.core.batch import Batch
from services.worker.cost_profile import Costs, read_profile, write_profile
from services.worker.engine.load import Engine, load_engine
from services.worker.policy.cost_fit import CostForm, StageShape
from services.worker.profiling.build import key_of
from services.worker.profiling.measure import Measured, Options, limits_of, measure
from services.worker.profiling.memory import copies, remap_s_per_gb
from services.worker.profiling.stage_timer import StageTimer
from tests.unit.worker.test_cost_profile import make_profile
from tools.model.tiny import make_tiny

OPTIONS = Options(batch_tokens=64, sequences=8, kv_tokens=1024, visits=1, held_out_count=4)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny", layers=3, vocab=320, max_len=256)


@pytest.fixture
def engine(model_dir: Path) -> Iterator[Engine]:
    with load_engine(model_dir, device_memory_bytes=24 << 20) as engine:
        yield engine


def settings_of(model_dir: Path, **more: object) -> WorkerSettings:
    return build(WorkerSettings, {"model": model_dir, **more})


def measured_and_told(engine: Engine, options: Options) -> tuple[Measured, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    return measure(engine, options, lambda done, total, what: told.append((done, total))), told


def test_every_kind_of_stage_is_measured_and_fitted(engine: Engine) -> None:
    measured, told = measured_and_told(engine, OPTIONS)
    shapes = {sample.shape for sample in measured.samples}
    assert shapes == {
        StageShape(3, True, True),
        StageShape(1, True, False),
        StageShape(1, False, False),
        StageShape(1, False, True),
    }
    assert all(sample.seconds > 0 for sample in [*measured.samples, *measured.held_out])
    whole = [sample for sample in measured.held_out if sample.shape == measured.whole]
    assert len(whole) == 2 * OPTIONS.held_out_count
    costs = measured.fit()
    assert costs.of(measured.whole).batch_cost_s([Chunk(0, 64)]) > costs.of(measured.whole).batch_cost_s([Chunk(0, 8)])
    for form in CostForm:
        for prefix in (False, True):
            assert measured.errors(measured.fit(form), prefix=prefix).count > 0
    assert "processor time" in measured.clock
    assert told[0][0] == 0
    assert told[-1] == (told[-1][1], told[-1][1])
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert engine.runner.sequence_ids == ()
    engine.check()


def test_a_time_limit_leaves_enough_measurements_for_a_fit(engine: Engine) -> None:
    measured, told = measured_and_told(engine, Options(batch_tokens=64, sequences=8, kv_tokens=1024, seconds=0.0))
    assert len(measured.samples) == 24
    assert told[-1] == (told[-1][1], told[-1][1])
    measured.fit()


def test_one_layer_has_no_stages_and_cannot_be_remapped(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path / "model", layers=1, vocab=320, max_len=128)
    with load_engine(tmp_path / "model", device_memory_bytes=8 << 20) as engine:
        measured = measure(engine, Options(batch_tokens=32, sequences=4, kv_tokens=512, visits=1, held_out_count=1))
        assert {sample.shape for sample in measured.samples} == {StageShape(1, True, True)}
        assert remap_s_per_gb(engine) is None


def test_remaps_and_copies_are_measured(engine: Engine) -> None:
    moved = remap_s_per_gb(engine)
    assert moved is not None
    assert moved > 0
    assert copies(engine).to_device_bytes_per_s > 0
    engine.check()


def test_stages_that_the_model_does_not_have(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="stages of 3 layers: must be from 1 to 2"):
        measure(engine, Options(batch_tokens=64, sequences=8, kv_tokens=1024, layer_counts=(1, 3)))


def test_too_little_memory_for_a_profile(model_dir: Path) -> None:
    with (
        load_engine(model_dir, device_memory_bytes=2 << 20) as engine,
        pytest.raises(ConfigError, match="too small for a profile"),
    ):
        limits_of(engine, Options(sequences=engine.block_count))


def test_a_limit_of_batches_below_that_of_a_profile_is_named(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens: must be at least 32 for a profile, got 16"):
        limits_of(engine, Options(batch_tokens=16, sequences=4))


def test_kv_in_float8_is_profiled(model_dir: Path) -> None:
    with load_engine(model_dir, device_memory_bytes=24 << 20, kv_cache_dtype="fp8") as engine:
        timer = StageTimer(engine)
        timer.fill_kv(8)
        assert engine.memory.kv.layer(2)[:8].float().std() == pytest.approx(1.0, abs=0.1)
        assert timer.least_s([Chunk(16, 4)], StageShape(3, True, True), repetitions=1) > 0


def test_a_worker_starts_with_the_profile_of_its_model_and_refuses_another(
    engine: Engine, model_dir: Path, tmp_path: Path
) -> None:
    whole = StageShape(3, True, True)
    measured = measure(engine, OPTIONS)
    right = make_profile().model_copy(update={"key": key_of(engine), "costs": Costs.of(measured.fit())})
    write_profile(tmp_path / "right.json", right)
    write_profile(tmp_path / "wrong.json", make_profile())
    costs = load_costs(settings_of(model_dir, cost_profile=tmp_path / "right.json"), engine)
    costs.enter(whole)
    assert costs.current() == read_profile(tmp_path / "right.json").costs.stages().of(whole)
    with pytest.raises(ConfigError, match=r"profile for other conditions: .*parameter_count is 1000 there"):
        load_costs(settings_of(model_dir, cost_profile=tmp_path / "wrong.json"), engine)


def test_a_worker_may_measure_itself_or_start_without_a_profile(engine: Engine, model_dir: Path) -> None:
    whole = StageShape(3, True, True)
    small: dict[str, float] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    unknowing = load_costs(settings_of(model_dir, **small), engine)
    unknowing.enter(whole)
    assert unknowing.current() is None
    knowing = load_costs(settings_of(model_dir, **small, self_profile_s=0.1), engine)
    knowing.enter(whole)
    assert knowing.current() is not None
    assert engine.step(Batch(1, (), (), ()), ()).token_ids == ()  # the engine can still serve
