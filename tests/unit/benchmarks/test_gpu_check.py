import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu_check import PARTS, CheckPart, CheckVerdict, command, memory_calls, page, priorities
from tests.support.fake_driver import OnTheCpu, load

ROOT = Path(__file__).parents[3]


def test_every_part_has_tests_for_gpus() -> None:
    everything = CheckPart("all", "", tuple(test for part in PARTS for test in part.tests))
    listed = subprocess.run(command(everything, "--collect-only"), capture_output=True, text=True, check=True, cwd=ROOT)
    for test in everything.tests:
        assert test in listed.stdout


def test_tests_that_need_more_gpus_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    named = dict[int, set[str]]()
    for count in (1, 2):
        monkeypatch.setattr("torch.cuda.device_count", lambda there=count: there)
        named[count] = {part.name for part in PARTS if part.applies}
    assert named[2] - named[1] == {"sums"}


def test_memory_calls_are_made_and_undone() -> None:
    driver = load()
    driver.set_granularity(16 << 10)
    driver.fail_at(None)
    cuda = pytest.importorskip("cuda.bindings.driver")
    names = [name for name, _ in memory_calls(OnTheCpu(cuda, 0))]
    assert [name.split(",")[0] for name in names[:3]] == ["map", "access", "unmap"]
    assert (driver.counts, driver.violation) == ((0, 0, 0, 0), "")


def test_the_page_names_failed_parts() -> None:
    verdicts = [CheckVerdict(PARTS[0], True, 3.0, "9 passed"), CheckVerdict(PARTS[1], False, 1.0, "1 failed")]
    text = page(["- a GPU"], verdicts, [("map", 1.5)], [("inside the device", 900.0)], [("tcp, idle: median", 0.25)])
    assert "| memory | proven | 3 |" in text
    assert "| kernel | **FAILED** | 1 |" in text
    assert "| map | 1.5 |" in text
    assert "| tcp, idle: median | 0.25 |" in text


def test_the_delay_of_activations_by_kv_is_measured_between_any_devices() -> None:
    waits = dict(priorities("cpu,cpu", "tcp", "--rounds", "1", "--seconds", "0.2"))
    assert len(waits) == 6
    assert all(0.0 < wait_ms < 60e3 for wait_ms in waits.values())
