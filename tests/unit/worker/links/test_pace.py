"""The size of chunks, and the time at which the next activation is expected."""

import pytest

from services.worker.links.pace import ChunkSize, StagePace

KIB = 1024


def sizes(rate: float | None = None) -> ChunkSize:
    return ChunkSize(512 * KIB, 4, 32 * KIB, 8 * KIB * KIB, rate)


def test_the_configured_size_applies_until_speed_and_stage_are_known() -> None:
    chunks = sizes()
    assert chunks.bytes_for(0.01) == 512 * KIB
    for _ in range(20):
        chunks.moved(1000, 0.001)
    assert chunks.rate_bytes_per_s == pytest.approx(1e6)
    assert chunks.bytes_for(None) == 512 * KIB


@pytest.mark.parametrize("stage_s", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("rate", [1e5, 1e7, 1e8, 1e9])
def test_data_in_flight_takes_a_stages_time_or_is_one_minimum_chunk(rate: float, stage_s: float) -> None:
    chunks = sizes(rate)
    size, window = chunks.bytes_for(stage_s), chunks.window_for(activations_flow=True)
    assert 32 * KIB <= size <= 8 * KIB * KIB
    assert window == 2
    assert size * window / rate <= stage_s or size == 32 * KIB


def test_more_chunks_are_in_flight_while_no_activations_are_sent() -> None:
    assert sizes().window_for(activations_flow=False) == 4


def test_the_speed_follows_measurements() -> None:
    chunks = sizes(rate=1e9)
    for _ in range(8 * 16):
        chunks.moved(100_000, 0.001)
    assert chunks.rate_bytes_per_s == pytest.approx(1e8)
    for _ in range(8 * 16):
        chunks.moved(100_000, 0.01)
    assert chunks.rate_bytes_per_s == pytest.approx(1e7)


def test_chunks_that_end_in_a_burst_count_together() -> None:
    chunks = sizes()
    for took_s in [0.004, 0.0, 0.0, 0.0] * 4:
        chunks.moved(1_000_000, took_s)
    assert chunks.rate_bytes_per_s == pytest.approx(1e9)


def test_a_busy_machine_does_not_slow_a_link_permanently() -> None:
    """The rate is the maximum over several measurements, so those in which threads woke late do not count."""
    chunks = sizes()
    for _ in range(16):
        chunks.moved(100_000, 0.001)
    for _ in range(7 * 16):
        chunks.moved(100_000, 0.1)
    assert chunks.rate_bytes_per_s == pytest.approx(1e8)


def test_an_activation_is_expected_at_the_end_of_the_stage() -> None:
    pace = StagePace()
    pace.begins(10.0)
    assert pace.due_at_s is None, "no stage has run yet, so its duration is unknown"
    pace.ran(0.5)
    assert pace.stage_s == 0.5
    pace.begins(11.0)
    assert pace.due_at_s == 11.5
    assert not pace.is_late(11.6)
    assert pace.is_late(11.7)
    pace.ran(1.3)
    assert pace.due_at_s is None
    assert pace.stage_s == pytest.approx(0.6)
