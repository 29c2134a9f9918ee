import json

from ballastpb.worker.v1 import worker_pb2 as pb
from tools.bench.timeline import timeline


def span(kind: str, began_s: float, took_s: float, **given: object) -> pb.TraceSpan:
    fields = {"epoch": 3, "step_id": 9, "token_count": 40} | given
    return pb.TraceSpan(kind=kind, began_unix_s=began_s, duration_s=took_s, **fields)  # pyright: ignore[reportArgumentType] -- any field


def test_every_stage_has_a_track_and_time_counts_from_the_first_span() -> None:
    leader = pb.GetTraceResponse(
        worker_id="w0", spans=[span("run", 1000.0, 0.010), span("send", 1000.010, 0.002)], busy_s=3, idle_s=1
    )
    follower = pb.GetTraceResponse(
        worker_id="w1",
        spans=[
            span("receive", 1000.011, 0.001),
            span("run", 1000.012, 0.009),
            span("transition", 1000.5, 0.0, what="prepared", epoch=4),
        ],
    )
    events = timeline([follower, leader])
    json.dumps(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "w0", 2: "w1"}
    assert any("25.0% bubbles" in str(e["args"]["name"]) for e in events if e["name"] == "thread_name")
    runs = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], round(e["ts"]), round(e["dur"])) for e in runs] == [(1, 0, 10_000), (2, 12_000, 9_000)]
    assert runs[0]["args"] == {"epoch": 3, "microbatch": 9, "tokens": 40}
    begun = {e["id"]: e["ts"] for e in events if e["ph"] == "b"}
    ended = {e["id"]: e["ts"] for e in events if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert sorted(round(ended[key] - begun[key]) for key in begun) == [1_000, 2_000]
    (instant,) = (e for e in events if e["ph"] == "i")
    assert (instant["name"], instant["pid"]) == ("epoch 4 prepared", 2)


def test_workers_without_work_give_an_empty_picture() -> None:
    assert all(e["ph"] == "M" for e in timeline([pb.GetTraceResponse(worker_id="w0")]))
