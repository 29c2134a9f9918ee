"""Reintroduces, one at a time, defects that a GPU would reveal at once; the test for each defect must fail.

    python -m tests.support.put_back

Each defect restores an earlier line of a function. Run it in a new process, since torch gets a fake device permanently.
"""

from __future__ import annotations  # also applies to the code compiled here

import inspect
import textwrap
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from services.worker.engine.runner import ModelRunner
from services.worker.links.channels.nccl import NcclMover, NcclTransport
from services.worker.links.receiving import BulkReceiver
from services.worker.pipeline.hub import Hub

_LINKS = "tests/unit/worker/links"
_SEEN_ON_A_FAKE_DEVICE = ""


@dataclass(frozen=True, slots=True)
class Defect:
    owner: type
    function: str
    line: str  # part of the line to replace
    once: str
    test: str
    says: str


DEFECTS: Mapping[str, Defect] = {
    "received where the host cannot write": Defect(
        BulkReceiver,
        "_take_chunk",
        "view is not None and view.device == device",
        "view is not None",
        f"{_LINKS}/test_devices.py::test_a_transfer_waits_until_its_bytes_are_computed[tcp]",
        "ChannelBroken",
    ),
    "words on the device": Defect(
        Hub,
        "device_of",
        'self._device if topic in (Topic.BATCH, Topic.ACTIVATIONS) else "cpu"',
        "self._device",
        f"{_LINKS}/test_devices.py::test_only_hidden_states_are_received_on_the_device",
        "<Topic.RESULT: 2> != <Topic.ACTIVATIONS: 24>",
    ),
    "completed is delivered": Defect(
        NcclMover,
        "move",
        "work.wait(_EVER)",
        "any(time.sleep(5e-5) for _ in iter(work.is_completed, True))",
        f"{_LINKS}/test_nccl.py::test_a_failed_receive_breaks_its_link_and_delivers_nothing[ends0]",
        "DID NOT RAISE",
    ),
    "torch ends the process": Defect(
        NcclTransport,
        "__init__",
        "os.environ.update(UNWATCHED)",
        "pass",
        f"{_LINKS}/test_nccl.py::test_torchs_watchdog_is_off_when_the_first_group_is_created",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
    "hidden states stay where they came": Defect(  # must be last, since the fake device stays
        ModelRunner,
        "compute",
        "hidden_TD.to(device)",
        "hidden_TD",
        _SEEN_ON_A_FAKE_DEVICE,
        "stage middle",
    ),
}


@contextmanager
def put_back(defect: Defect) -> Generator[None]:
    now = getattr(defect.owner, defect.function)
    source = textwrap.dedent(inspect.getsource(now))
    assert source.count(defect.line) == 1, f"{defect.function} has changed, it must have one line with {defect.line}"
    made: dict[str, Any] = {}
    exec(source.replace(defect.line, defect.once), now.__globals__, made)
    setattr(defect.owner, defect.function, made[defect.function])
    try:
        yield
    finally:
        setattr(defect.owner, defect.function, now)


class _Failures:
    """A pytest plugin that collects failures."""

    def __init__(self) -> None:
        self.said = ""
        self.run = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.run += report.when == "call"
        if report.failed:
            self.said += report.longreprtext


def failure(test: str) -> str:
    """The test's failure report, or "" if it passes."""
    if test == _SEEN_ON_A_FAKE_DEVICE:
        from tests.unit.worker.engine import fake_device

        try:
            fake_device.main()
        except Exception:  # noqa: BLE001 any error detects the defect
            return traceback.format_exc()
        return ""
    failures = _Failures()
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=no", "--no-header", test], [failures])
    assert failures.run, f"{test} has not been run"
    return failures.said


def main() -> None:
    for name, defect in DEFECTS.items():
        with put_back(defect):
            said = failure(defect.test)
        print(f"{name}: {'seen' if defect.says in said else said or 'not seen'}", flush=True)


if __name__ == "__main__":
    main()
