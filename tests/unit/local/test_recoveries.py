"""The chaos report of a fault: the longest wait for a token, and the time until the cluster had recovered."""

from pathlib import Path

import pytest

from ballast.client import AsyncClient
from tools.local.chaos import Chaos, ChaosRules, Recovery, percentile
from tools.local.cluster import LocalCluster, ServiceProcess
from tools.local.process import ChildProcess


def test_a_fault_is_charged_with_the_longest_wait_that_overlaps_it() -> None:
    recovery = Recovery()
    recovery.add(began_s=10.0, healed_s=12.0, whole_s=15.0)
    recovery.add(began_s=30.0, healed_s=30.0, whole_s=31.0)
    recovery.compare([(1.0, 9.5), (9.0, 10.5), (14.5, 17.0), (16.0, 29.0)])
    assert recovery.waits_s == [2.5, 0.0], "a wait counts if it overlaps the time from the fault until all is whole"
    assert recovery.times_s == [3.0, 1.0], "counted from the end of the fault"


def test_percentiles_are_times_that_occurred() -> None:
    assert percentile([], 0.99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


async def test_a_dispatcher_that_does_not_answer_in_the_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.local.chaos.BACK_WITHIN_S", 0.5)
    cluster = LocalCluster(tmp_path, workers=0)
    child = ChildProcess("dispatcher-0", ["sleep", "30"], log_path=tmp_path / "log")
    cluster.processes["dispatcher"].append(ServiceProcess("dispatcher", "dispatcher-0", child, "127.0.0.1:1"))

    def quick(_: Chaos, address: str) -> AsyncClient:
        return AsyncClient(address, connect_timeout_s=0.2)

    monkeypatch.setattr(Chaos, "_client", quick)
    assert "127.0.0.1:1" in await Chaos(cluster, ChaosRules(), print)._why_not_idle()
    child.kill()
