"""The text output of `ballast why`."""

from dataclasses import replace

from ballast.client import RequestMoment, RequestStory
from tools.cli.why import tell

STORY = RequestStory(
    request_id="r-1",
    dispatcher_id="dispatcher-0",
    state="length",
    error="",
    age_s=3.0,
    priority="default",
    caller="ipv4:127.0.0.1:5",
    prompt_token_count=12,
    completion_token_count=64,
    max_token_count=64,
    queue_s=1.2,
    ttft_s=1.5,
    tpot_s=0.02,
    e2e_s=2.8,
    replay_count=0,
    move_count=1,
    recall_count=0,
    longest_gap_s=0.3,
    longest_gap_token_count=37,
    moments=(
        RequestMoment(at_s=0.0, what="waiting", detail="behind 4 others; the only worker has 98% of its KV in use"),
        RequestMoment(at_s=1.2, what="placed", worker_id="worker-3"),
        RequestMoment(at_s=1.5, what="first_token", worker_id="worker-3"),
        RequestMoment(at_s=2.0, what="moved", worker_id="worker-1", token_count=37),
        RequestMoment(
            at_s=2.3, what="resumed", worker_id="worker-1", token_count=37, gap_s=0.3, detail="epoch 7, overload"
        ),
    ),
    left_out_moment_count=0,
)


def test_an_ended_request_is_described_from_arrival_to_end() -> None:
    assert list(tell(STORY)) == [
        "r-1 ended at its maximum length after 2.80 s, 3.00 s ago",
        "  12 prompt tokens, 64 of 64 new; priority default, from ipv4:127.0.0.1:5; reported by dispatcher-0",
        "  queued 1.20 s, first token after 1.50 s, then 20.0 ms per token, 1 move",
        "  longest time between two tokens: 300.0 ms, after token 37, when it moved to worker-1",
        "      0.000 s  waits in the backlog (behind 4 others; the only worker has 98% of its KV in use)",
        "      1.200 s  placed on worker-3",
        "      1.500 s  first token, from worker-3",
        "      2.000 s  continues on worker-1 after token 37",
        "      2.300 s  token 38 from worker-1, 300.0 ms after the previous one (epoch 7, overload)",
    ]


def test_only_losses_that_occurred_are_shown() -> None:
    refused = replace(STORY, state="refused", error="8 requests are waiting", moments=(), ttft_s=None, tpot_s=None)
    lines = list(tell(replace(refused, move_count=0)))
    assert lines[0] == "r-1 was refused, 3.00 s ago"
    assert lines[1] == "  8 requests are waiting"
    assert len(lines) == 3
