import dataclasses
from io import StringIO

import pytest
from rich.console import Console

from ballast.client import ClusterStatus
from ballast.client.codec import status_from_proto
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.units import human_count, human_duration
from ballast.rpc.codec import LAYOUT
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb
from tests.support.scripted_dispatcher import worker_status
from tools.cli.history import DemandHistory
from tools.cli.looks import DispatcherFacts, Look, added_up
from tools.cli.render import render_status
from tools.cli.top import Rates


def shown(
    status: ClusterStatus,
    width: int = 120,
    rates: dict[str, float] | None = None,
    history: DemandHistory | None = None,
) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(render_status(Look(status, (DispatcherFacts.of(status),)), rates, history))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def cluster(*workers: pb.WorkerStatus) -> ClusterStatus:
    groups = tuple(
        Group(GroupId(worker.group_id), (Member(WorkerId(worker.worker_id), Incarnation(2), worker.address, 0, 4),))
        for worker in workers
    )
    response = pb.GetStatusResponse(
        dispatcher_id="dispatcher-0",
        version="0.1.0",
        layout=LAYOUT.message(Layout(Epoch(3), 4, groups, "join")),
        workers=workers,
        model=cluster_pb2.ModelInfo(
            name="tiny",
            architecture="LlamaForCausalLM",
            layer_count=4,
            max_model_len=1024,
            dtype="float32",
            parameter_count=1_234_567,
            kv_bytes_per_token=2048,
        ),
        backlog_request_count=7,
        max_queued_request_count=1024,
        max_queued_token_count=1 << 20,
        requests_total={"stop": 5, "cancelled": 0},
        uptime_s=3725,
        state_server_reachable=True,
    )
    return status_from_proto(response, "127.0.0.1:50051")


def line_of(text: str, *words: str) -> str:
    found = [line for line in text.splitlines() if all(word in line for word in words)]
    assert len(found) == 1, text
    return found[0]


def test_the_page_shows_layers_and_load_of_each_worker() -> None:
    text = shown(cluster(worker_status("worker-0"), worker_status("worker-1", used=96)))
    assert "dispatcher-0 at 127.0.0.1:50051 · version 0.1.0 · up 1 h 2 min · state server reachable" in text
    assert "tiny · LlamaForCausalLM · 4 layers · 1.2 million parameters · float32 · up to 1,024 tokens" in text
    assert "epoch 3 (join) · 2 groups" in text
    assert "7 of 1,024 requests" in text
    assert line_of(text, "ended").split() == ["ended", "5", "stop"]
    row = line_of(text, "worker-0", "serving")
    assert "0-3" in row
    assert "3 of 64" in row
    assert "██░░░░░░  25% of 100" in row
    assert "███████░  96% of 100" in line_of(text, "worker-1", "serving")


def test_memory_is_shown_as_a_sum() -> None:
    text = shown(cluster(worker_status()))
    assert " ".join(line_of(text, "device memory").split()) == "device memory parameters + KV + free = budget"
    row = " ".join(line_of(text, "worker-0", "adds up").split())
    assert row == "worker-0 100.0 MiB 700.0 MiB 224.0 MiB 1.0 GiB adds up"


def test_memory_that_does_not_add_up_is_flagged() -> None:
    worker = worker_status()
    worker.load.memory.free_bytes += 4096
    assert "does not add up: +4,096 B" in shown(cluster(worker))


def test_states_that_need_attention() -> None:
    away, leaving, silent = worker_status("a"), worker_status("b"), worker_status("c")
    away.connected = False
    leaving.load.draining = True
    silent.ClearField("load")
    status = dataclasses.replace(cluster(away, leaving, silent), draining=True, state_server_reachable=False)
    text = shown(status)
    assert "not connected" in line_of(text, "a ", "0-3")
    assert "draining" in line_of(text, "b ", "0-3")
    assert line_of(text, "c ", "0-3").split()[-3:] == ["-"] * 3
    assert "draining · state server not reachable" in text


def test_an_empty_cluster_is_shown_with_a_remedy() -> None:
    status = dataclasses.replace(cluster(), layout=None, model=None, requests_total={})
    text = shown(status)
    assert "no workers yet" in text
    assert "none yet: is a planner running?" in text
    assert "no request yet" in text


def test_the_page_fits_a_terminal_of_eighty_columns() -> None:
    worker = worker_status("worker-10", used=9_000)
    worker.load.block_count = 10_240
    text = shown(cluster(worker), width=80, rates={"worker-10": 1234.5})
    assert max(map(len, text.splitlines())) <= 80
    assert "88% of 10,240   1,234.5" in text
    assert "1.0 GiB" in text


def merge(status: ClusterStatus, group_id: str = "merged") -> ClusterStatus:
    """All workers as stages of one group; only the leader has a report."""
    count = len(status.workers)
    members = tuple(
        Member(WorkerId(worker.worker_id), Incarnation(2), worker.address, 4 * i // count, 4 * (i + 1) // count)
        for i, worker in enumerate(status.workers)
    )
    followers = (dataclasses.replace(worker, load=None, group_id=group_id) for worker in status.workers[1:])
    return dataclasses.replace(
        status,
        layout=Layout(Epoch(4), 4, (Group(GroupId(group_id), members),), "overload"),
        workers=(dataclasses.replace(status.workers[0], group_id=group_id), *followers),
    )


def test_workers_that_serve_together_are_one_block() -> None:
    text = shown(merge(cluster(worker_status("worker-0"), worker_status("worker-1"))))
    row = line_of(text, "merged", "serving")
    assert row.split()[:2] == ["merged", "0-3"]
    assert "3 of 64" in row
    assert " 25% of 100" in row
    assert line_of(text, "├ worker-0").split() == ["├", "worker-0", "0-1", "leads"]
    assert line_of(text, "└ worker-1").split() == ["└", "worker-1", "2-3", "follows"]
    assert text.index("├ worker-0") < text.index("└ worker-1") < text.index("device memory")


def test_a_member_that_drains_and_a_group_without_a_stream_stand_out() -> None:
    status = merge(cluster(worker_status("worker-0"), worker_status("worker-1")))
    assert status.layout is not None
    [group] = status.layout.groups
    leaving = dataclasses.replace(group.members[1], draining=True)
    layout = dataclasses.replace(
        status.layout, groups=(dataclasses.replace(group, members=(group.members[0], leaving)),)
    )
    workers = tuple(dataclasses.replace(worker, connected=False) for worker in status.workers)
    text = shown(dataclasses.replace(status, layout=layout, workers=workers))
    assert "not connected" in line_of(text, "merged", "0-3")
    assert "draining" in line_of(text, "└ worker-1")


def test_demand_is_drawn_over_time_against_the_capacity_of_each_group() -> None:
    history = DemandHistory()
    for used in (10, 50, 90):
        history.add(cluster(worker_status("worker-0", used=used), worker_status("worker-1")))
    over = worker_status("worker-0", used=100)
    over.load.waiting_block_count = 40
    status = dataclasses.replace(cluster(over, worker_status("worker-1")), backlog_token_count=800)
    history.add(status)
    text = shown(status, history=history)
    assert line_of(text, "2,240 of 1,600").split()[:3] == ["worker-0", "▁▅██", "140%"]
    assert line_of(text, "400 of 1,600").split()[:3] == ["worker-1", "▃▃▃▃", "25%"]
    assert line_of(text, "all, with backlog").split()[3:] == ["▂▄▅█", "108%", "3,440", "of", "3,200"]
    bigger = merge(status)
    history.add(bigger)  # the leader's history continues; the follower no longer has its own demand
    text = shown(bigger, history=history)
    assert "▁▅███" in line_of(text, "merged", "140%")
    assert "▃▃▃" not in text


def test_a_group_that_has_not_reported_has_no_demand_to_show() -> None:
    silent = worker_status("worker-0")
    silent.ClearField("load")
    history = DemandHistory()
    history.add(cluster(silent))
    assert line_of(shown(cluster(silent), history=history), "worker-0", "0 of 0").split()[1:] == [
        "▁",
        "-",
        "0",
        "of",
        "0",
    ]


def test_the_page_of_top_fits_eighty_columns() -> None:
    history = DemandHistory()
    status = merge(cluster(worker_status("worker-0"), worker_status("worker-1")), "group-17")
    for _ in range(50):
        history.add(status)
    text = shown(status, width=80, rates={"worker-0": 1234.5}, history=history)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "▃" * 24 in text
    assert "▃" * 25 not in text


def test_rates_are_those_of_one_incarnation_of_a_worker() -> None:
    rates = Rates()
    first, second, restarted = worker_status(), worker_status(), worker_status()
    second.load.generation_tokens_total = 1000
    restarted.incarnation, restarted.load.generation_tokens_total = 3, 10
    assert rates.update(cluster(first), 10.0) == {}
    assert rates.update(cluster(second), 12.0) == {"worker-0": 50.0}
    assert rates.update(cluster(restarted), 13.0) == {}
    assert "50.0" in line_of(shown(cluster(second), rates={"worker-0": 50.0}), "serving")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1500, "1.5 thousand"), (7 * 10**9, "7.0 billion")]
)
def test_counts(number: int, text: str) -> None:
    assert human_count(number) == text


@pytest.mark.parametrize(
    ("duration_s", "text"), [(0.4, "0 s"), (61, "1 min 1 s"), (3725, "1 h 2 min"), (90000, "1 d 1 h")]
)
def test_durations(duration_s: float, text: str) -> None:
    assert human_duration(duration_s) == text


def test_offline_work_has_a_line_of_its_own_with_its_rate() -> None:
    status = cluster(worker_status("a"))
    assert "offline" not in shown(status)
    load = status.workers[0].load
    assert load is not None
    busy = dataclasses.replace(load, offline_running_count=3, offline_waiting_count=1, offline_tokens_total=5000)
    busy = dataclasses.replace(busy, offline_yields_total=7, offline_lost_tokens_total=50)
    worker = dataclasses.replace(status.workers[0], load=busy)
    status = dataclasses.replace(status, workers=(worker,), offline_queued_count=2)
    console = Console(file=StringIO(), width=130)
    console.print(render_status(Look(status, ()), None, None, {"a": 1234.0}))
    assert isinstance(console.file, StringIO)
    line_of(
        console.file.getvalue(),
        "offline",
        "3 running",
        "3 waiting",
        "5,000 tokens",
        "1,234 tokens/s",
        "7 preemptions, 1.0% recomputed",
    )


def test_backlogs_of_several_dispatchers_are_summed() -> None:
    one = dataclasses.replace(cluster(worker_status()), backlog_request_count=2, offline_queued_count=5)
    both = added_up([one, dataclasses.replace(one, offline_queued_count=7)])
    assert (both.backlog_request_count, both.offline_queued_count) == (4, 12)
