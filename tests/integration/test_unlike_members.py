"""A cluster whose workers have different memory sizes: dropping as much as possible and restoring, under load, changes
no token.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ballast.client import AsyncClient
from ballastpb.planner.v1 import planner_pb2 as pb
from tests.integration.test_drop_and_restore import LONG, Planner, answers, load
from tests.support.cluster import RunningCluster, idle, running_cluster, until
from tools.model.tiny import make_preset

pytestmark = pytest.mark.rotating

MEMORIES_MIB = (48.0, 48.5, 60.0, 96.0, 150.0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    model = make_preset("ballast-half", tmp_path_factory.mktemp("model") / "half")
    first, *more = [int(mib * (1 << 20)) for mib in MEMORIES_MIB]
    flags = {"planner": ["--overload-policy", "recompute"]}
    with running_cluster(Path(model), workers=1, device_memory_bytes=first, flags=flags) as cluster:
        for budget_bytes in more:
            cluster.run(cluster.cluster.start_worker(["--device-memory-bytes", str(budget_bytes)]))
        yield cluster


def test_members_of_unlike_memory_drop_and_restore_under_load(running: RunningCluster) -> None:
    async def story() -> None:
        planner = Planner(running.cluster.processes["planner"][0].address)
        names = [process.id for process in running.cluster.processes["worker"]]
        async with AsyncClient(running.cluster.address) as client:
            expected = await answers(client, LONG)
            before = await until(client, idle)
            assert before.layout is not None
            assert len(before.layout.groups) == len(MEMORIES_MIB), "every worker must be in the layout"
            assert before.kept_out == {}
            rooms = {group.group_id: group.capacity_tokens for group in before.groups}
            assert rooms["worker-4"] > 2 * rooms["worker-0"]

            async with load(client, expected):
                begun = await planner.stub.Drop(pb.DropRequest(worker_ids=names, request_id="all"), timeout=60)
                dropped = await planner.end(begun.epoch)
            assert dropped.phase == "done", dropped.summary
            assert dropped.kv_bytes_exchanged > 0
            grouped = await until(client, idle)
            [group] = grouped.groups
            assert group.capacity_tokens >= sum(rooms.values()), dropped.summary

            async with load(client, expected):
                begun = await planner.stub.Restore(pb.RestoreRequest(request_id="back"), timeout=60)
                restored = await planner.end(begun.epoch)
            assert restored.phase == "done", restored.summary
            alone = await until(client, idle)
            assert {group.group_id: group.capacity_tokens for group in alone.groups} == rooms
            assert await answers(client, LONG) == expected
        await planner.close()

    running.run(story(), timeout_s=240.0)
