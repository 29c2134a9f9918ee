import pytest

from services.worker.policy.step_limits import StepLimits, limiting_factor, step_limits

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gpu_bytes", "expected"),
    [
        (None, StepLimits(64, 512, 64)),
        (24 * GIB, StepLimits(256, 2048, 256)),
        (79 * GIB, StepLimits(512, 4096, 512)),
        (180 * GIB, StepLimits(512, 8192, 512)),
    ],
)
def test_unset_limits_follow_from_the_device(gpu_bytes: int | None, expected: StepLimits) -> None:
    assert step_limits(gpu_bytes) == expected


def test_set_limits_hold_and_others_are_adapted() -> None:
    assert step_limits(None, sequences=700) == StepLimits(700, 700, 64)
    assert step_limits(79 * GIB, tokens=100) == StepLimits(100, 100, 100)
    assert step_limits(79 * GIB, sequences=8, tokens=9000, queued=3) == StepLimits(8, 9000, 3)


def test_the_log_names_the_limits() -> None:
    limits = StepLimits(256, 2048, 256)
    said = limiting_factor(limits, 300_000, 8192)
    assert said == (
        "up to contexts of 1171 tokens on average --max-num-seqs, 256; above that KV memory, 300000 tokens;"
        " a step computes at most 2048 tokens"
    )
    assert "holds that many of the longest contexts" in limiting_factor(limits, 300_000, 1024)
