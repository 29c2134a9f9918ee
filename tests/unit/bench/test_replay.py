import asyncio

import pytest

from ballast.common.errors import DeadlineExceeded, Overloaded, Unavailable
from tests.unit.bench.fake_target import TimerTarget
from tools.bench.records import ReplayRun, RequestOutcome
from tools.bench.replay import Replay, ReplayOptions, ReplayProgress, random_prompt
from tools.bench.traces import Trace, TraceRequest

VOCAB = 50


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    return Trace(source="here", format="ballast", requests=tuple(TraceRequest(*r) for r in requests))


def replay(target: TimerTarget, trace: Trace, **options: bool) -> ReplayRun:
    return asyncio.run(Replay(target, trace, ReplayOptions(**options), VOCAB).run())  # pyright: ignore[reportArgumentType]


def test_requests_are_sent_at_their_time_and_their_tokens_are_timed() -> None:
    run = replay(TimerTarget(first_s=0.05, token_s=0.02), trace_of((0.0, 3, 4), (0.1, 5, 1)))
    assert run.complete
    first, second = run.records
    assert [r.outcome for r in run.records] == [RequestOutcome.FINISHED] * 2
    assert (first.input_tokens, first.output_tokens, second.output_tokens) == (3, 4, 1)
    assert second.submit_s >= 0.1
    assert first.ttft_s is not None
    assert first.ttft_s >= 0.05
    assert first.tpot_s is not None
    assert first.tpot_s >= 0.02
    assert second.tpot_s is None
    assert first.e2e_s is not None
    assert first.e2e_s >= 0.11
    assert run.duration_s == max(first.end_s or 0, second.end_s or 0)
    assert not first.prompt_token_ids, "tokens are stored only on request"


def test_arrivals_do_not_wait_for_slow_answers() -> None:
    run = replay(TimerTarget(first_s=0.5), trace_of(*[(i * 0.01, 1, 1) for i in range(20)]))
    last = run.records[-1]
    assert last.submit_s < 0.4, "closed loop: the last request waited for the first"
    assert min(r.end_s or 0 for r in run.records) > last.submit_s


def test_ttft_counts_from_the_planned_arrival() -> None:
    run = replay(TimerTarget(), trace_of((0.0, 1, 1)))
    record = run.records[0]
    record.planned_s -= 3.0
    assert record.ttft_s is not None
    assert record.ttft_s > 3.0
    assert (record.e2e_s or 0) > 3.0


def test_kinds_of_endings_are_distinguished() -> None:
    target = TimerTarget(
        failures={1: Overloaded("full", 1.0), 2: DeadlineExceeded("late"), 3: Unavailable("worker-1", "gone")}
    )
    seen: list[ReplayProgress] = []
    requests = trace_of(*[(0.0, 1, 2)] * 5)
    run = asyncio.run(Replay(target, requests, ReplayOptions(), VOCAB, seen.append).run())
    assert [r.outcome for r in run.records] == [
        RequestOutcome.FINISHED,
        RequestOutcome.REFUSED,
        RequestOutcome.DEADLINE,
        RequestOutcome.FAILED,
        RequestOutcome.FINISHED,
    ]
    assert run.records[3].error == "Unavailable: worker-1: gone"
    assert run.complete
    last = seen[-1]
    assert (last.finished_count, last.refused_count, last.failed_count) == (2, 1, 2)
    assert (last.sent_count, last.ended_count, last.running_count, last.token_count) == (5, 5, 0, 4)


def test_an_answer_of_the_wrong_length_is_a_failure() -> None:
    run = replay(TimerTarget(short_by=1), trace_of((0.0, 1, 3)))
    assert run.records[0].outcome is RequestOutcome.FAILED
    assert "2 tokens instead of 3" in run.records[0].error


def test_tokens_are_recorded_on_demand() -> None:
    target = TimerTarget()
    run = replay(target, trace_of((0.0, 30, 3)), record_tokens=True)
    record = run.records[0]
    assert record.output_token_ids == [7, 8, 8]
    assert record.prompt_token_ids == target.prompts[record.request_id]
    assert len(record.prompt_token_ids) == 30


def test_stop_preserves_records_and_cancels_running_requests() -> None:
    target = TimerTarget(first_s=0.01, token_s=0.05)
    trace = trace_of((0.0, 1, 2), (0.0, 1, 10_000), (60.0, 1, 1))

    async def run_and_stop() -> ReplayRun:
        replay = Replay(target, trace, ReplayOptions(), VOCAB)
        asyncio.get_running_loop().call_later(2.0, replay.stop)
        async with asyncio.timeout(60):
            return await replay.run()

    run = asyncio.run(run_and_stop())
    assert not run.complete
    assert [r.outcome for r in run.records] == [RequestOutcome.FINISHED, RequestOutcome.CANCELLED]
    assert run.records[1].output_tokens > 0
    assert target.cancelled_ids == ["replay-1"]


def test_stop_before_a_request_has_begun() -> None:
    async def run_and_stop() -> ReplayRun:
        replay = Replay(TimerTarget(), trace_of((0.0, 1, 1)), ReplayOptions(), VOCAB)
        replay.stop()
        return await replay.run()

    assert not asyncio.run(run_and_stop()).complete


def test_a_bug_is_not_recorded_as_a_result() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        replay(TimerTarget(failures={0: ValueError("a bug")}), trace_of((0.0, 1, 1)))
    assert caught.group_contains(ValueError, match="a bug")


def test_the_cluster_is_sampled_and_failed_samples_are_counted() -> None:
    run = replay(TimerTarget(first_s=0.6, epochs=[0, 1]), trace_of((0.0, 1, 1)))
    assert [s.epoch for s in run.samples] == [0, 1]
    assert run.samples[1].at_s >= 0.5
    blind = replay(TimerTarget(first_s=0.6, failing_samples=True), trace_of((0.0, 1, 1)))
    assert (blind.samples, blind.failed_sample_count) == ([], 2)


def test_prompts_depend_on_seed_and_index_alone() -> None:
    prompt = random_prompt(1, 2, 40, VOCAB)
    assert prompt == random_prompt(1, 2, 40, VOCAB)
    assert prompt not in (random_prompt(1, 3, 40, VOCAB), random_prompt(2, 2, 40, VOCAB))
    assert all(0 <= token < VOCAB for token in prompt)
    assert all(type(token) is int for token in prompt)


def test_eta_comes_from_the_trace_and_then_from_the_rate() -> None:
    progress = ReplayProgress(total_count=10, span_s=60, elapsed_s=20, sent_count=4, finished_count=3)
    assert progress.eta_s == 40
    progress.elapsed_s, progress.sent_count, progress.finished_count = 80, 10, 8
    assert progress.eta_s == pytest.approx(20)
