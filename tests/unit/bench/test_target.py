from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from ballast.client import AsyncClient, ClusterStatus, WorkerStatus
from ballast.common.errors import Unavailable
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.model import ModelInfo
from tools.bench.target import ClusterTarget, sample_of

MODEL = ModelInfo(
    name="m",
    architecture="LlamaForCausalLM",
    layer_count=4,
    vocab_size=512,
    max_model_len=512,
    dtype="float32",
    parameter_count=1,
    kv_bytes_per_token=100,
    eos_token_ids=(1,),
)


def worker(name: str, used: int, waiting: int, block_count: int = 10) -> WorkerStatus:
    load = LoadReport(
        block_tokens=16,
        block_count=block_count,
        used_block_count=used,
        waiting_block_count=waiting,
        running_count=used,
        waiting_count=waiting,
        max_running_count=64,
        steps_total=1,
        preemptions_total=2,
        prompt_tokens_total=0,
        generation_tokens_total=0,
        step_age_s=0.0,
        draining=False,
        memory=MemoryReport(budget_bytes=0, parameter_bytes=0, kv_bytes=0, free_bytes=0),
    )
    return WorkerStatus(worker_id=name, incarnation=1, address="127.0.0.1:1", group_id="g", connected=True, load=load)


def status(*workers: WorkerStatus, backlog: int = 0, groups: Sequence[Sequence[str]] | None = None) -> ClusterStatus:
    """A cluster's status. Every worker forms its own group unless `groups` is given."""
    return ClusterStatus(
        dispatcher_id="dispatcher-0",
        address="127.0.0.1:2",
        version="0",
        layout=Layout(Epoch(3), 4, tuple(map(_group, groups or [[w.worker_id] for w in workers])), "join"),
        model=MODEL,
        workers=workers,
        backlog_request_count=backlog,
        backlog_token_count=backlog * 10,
        running_request_count=0,
        max_queued_request_count=100,
        max_queued_token_count=1000,
        requests_total={},
        draining=False,
        uptime_s=1.0,
        state_server_reachable=True,
    )


def _group(names: Sequence[str]) -> Group:
    share = 4 // len(names)
    members = (Member(WorkerId(n), Incarnation(1), "", share * i, share * i + share) for i, n in enumerate(names))
    return Group(GroupId("-".join(names)), tuple(members))


def test_demand_is_running_waiting_and_backlog_of_all_dispatchers() -> None:
    workers = (worker("a", used=4, waiting=2), worker("b", used=1, waiting=0, block_count=20))
    sample = sample_of([status(*workers, backlog=3), status(*workers, backlog=2)])
    assert sample.kv_used_bytes == 5 * 1600
    assert sample.kv_demand_bytes == sample.kv_used_bytes + 2 * 1600 + 50 * 100
    assert sample.kv_capacity_bytes == 48_000
    assert (sample.running_count, sample.waiting_count, sample.preemptions_total) == (5, 7, 4)
    assert (sample.epoch, sample.epoch_reason, sample.group_sizes) == (3, "join", (1, 1))


def test_a_group_counts_once_with_the_room_of_the_whole_copy() -> None:
    follower = replace(worker("b", 0, 0), load=None)
    workers = (worker("a", used=9, waiting=3, block_count=32), follower, worker("c", used=1, waiting=0))
    sample = sample_of([status(*workers, groups=["ab", "c"])])
    assert sample.kv_capacity_bytes == (32 + 10) * 1600
    assert sample.kv_used_bytes == 10 * 1600
    assert sample.kv_demand_bytes == 13 * 1600
    assert sample.group_sizes == (2, 1)


def test_a_worker_that_has_not_reported_counts_nothing() -> None:
    silent = replace(worker("b", 1, 1), load=None)
    assert sample_of([status(worker("a", 4, 2), silent)]).kv_capacity_bytes == 16_000


def test_a_cluster_without_workers_is_not_available() -> None:
    with pytest.raises(Unavailable, match="knows no worker yet"):
        sample_of([replace(status(), model=None)])


class OneStatus:
    addresses = ("here",)

    def __init__(self) -> None:
        self.now = status()

    async def status(self, address: str) -> ClusterStatus:
        return self.now


async def test_preemptions_of_a_worker_that_follows_still_count() -> None:
    client = OneStatus()
    target = ClusterTarget(cast(AsyncClient, client))
    workers = (worker("a", 1, 0), worker("b", 1, 0))
    counts: list[int] = []
    for groups in (["a", "b"], ["ab"], ["a", "b"]):
        client.now = status(*workers, groups=groups)
        counts.append((await target.sample()).preemptions_total)
    assert counts == [4, 4, 4]
