"""The shell with a small real engine on its real thread."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ballast.common.errors import DeadlineExceeded, InvariantViolation, Overloaded
from ballast.common.sampling import FinishReason
from ballast.service.tokenizer import load_tokenizer
from services.worker import output_stream
from services.worker import shell as shell_module
from services.worker.core.events import Aborted, SequenceKey
from services.worker.shell import INBOX_EVENTS
from tests.support.shells import (
    NOTHING_HELD,
    Gate,
    Heard,
    held,
    listen,
    running_shell,
    slow,
    submission,
    undisturbed,
    until,
)
from tools.model.tiny import make_tiny

LONG = 200  # tokens; far more than any story waits for


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "llama", layers=2, max_len=256)


# Any: the types that a story's coroutine sends and yields do not matter.
def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def reason(heard: Heard) -> FinishReason | None:
    assert heard.ending is not None
    return heard.ending.finish_reason


async def test_outputs_arrive_complete_and_in_order(model: Path) -> None:
    async with running_shell(model, max_running_count=4) as shell:
        stream = await shell.open_stream()
        events = [submission(stream, n, prompt=range(5, 6 + n)) for n in range(1, 21)]
        for event in events:
            await shell.post(event)
        heard = await listen(stream, [event.key.handle for event in events])
        tokenizer = load_tokenizer(model)
        for event in events:
            one = heard[event.key.handle]
            assert len(one.token_ids) == event.sampling.max_tokens
            assert reason(one) is FinishReason.LENGTH
            whole: str = tokenizer.decode([*event.prompt_token_ids, *one.token_ids])
            assert one.text
            assert one.text.rstrip("\ufffd") in whole
        await until(lambda: held(shell.load()) == NOTHING_HELD)
        assert shell.load().generation_tokens_total == sum(range(1, 21))
        shell.load().memory.check()


async def test_an_abort_frees_the_requests_blocks(model: Path) -> None:
    async with running_shell(model, slow) as shell:
        stream = await shell.open_stream()
        event = submission(stream, LONG)
        await shell.post(event)
        await until(lambda: shell.load().generation_tokens_total >= 3)
        aborted_at_s = time.monotonic()
        await shell.post(Aborted(aborted_at_s, event.key))
        heard = (await listen(stream, [event.key.handle]))[event.key.handle]
        assert reason(heard) is FinishReason.CANCELLED
        assert 3 <= len(heard.token_ids) < LONG
        assert held(shell.load()) == NOTHING_HELD
        await shell.post(Aborted(time.monotonic(), event.key))  # a second abort has no effect


async def test_a_deadline_ends_a_running_and_a_waiting_request(model: Path) -> None:
    async with running_shell(model, slow, max_running_count=1) as shell:
        stream = await shell.open_stream()
        due_at_s = time.monotonic() + 0.2
        events = [submission(stream, LONG, deadline_at_s=due_at_s) for _ in range(2)]
        for event in events:
            await shell.post(event)
        heard = await listen(stream, [event.key.handle for event in events])
        assert time.monotonic() >= due_at_s
        running, waiting = (heard[event.key.handle] for event in events)
        assert reason(running) is reason(waiting) is FinishReason.DEADLINE
        assert len(running.token_ids) > 0
        assert waiting.token_ids == []
        assert held(shell.load()) == NOTHING_HELD


async def test_closing_a_stream_ends_its_requests_and_no_others(model: Path) -> None:
    async with running_shell(model, slow) as shell:
        gone, stays = await shell.open_stream(), await shell.open_stream()
        await shell.post(submission(gone, LONG))
        event = submission(stays, 30)
        await shell.post(event)
        await until(lambda: shell.load().running_count == 2)
        shell.close_stream(gone)
        shell.close_stream(gone)
        await until(lambda: shell.load().running_count == 1)
        assert shell.stream_count == 1
        heard = await listen(stays, [event.key.handle])
        assert len(heard[event.key.handle].token_ids) == 30
        await until(lambda: held(shell.load()) == NOTHING_HELD)
        assert shell.load().generation_tokens_total < LONG


async def test_a_reader_that_falls_too_far_behind_is_dropped(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_stream, "STREAM_OUTPUTS", 20)

    async with running_shell(model, slow) as shell:
        lazy, busy = await shell.open_stream(), await shell.open_stream()
        await shell.post(submission(lazy, LONG))
        event = submission(busy, 60)
        await shell.post(event)
        heard = await listen(busy, [event.key.handle])
        assert len(heard[event.key.handle].token_ids) == 60
        assert shell.stream_count == 1
        await until(lambda: held(shell.load()) == NOTHING_HELD)
        assert lazy.broken.is_set()
        assert lazy.backlog_count == 0
        with pytest.raises(Overloaded, match="20 outputs"):
            await lazy.next()


async def test_load_reports_do_not_pile_up_for_an_idle_reader(model: Path) -> None:
    async with running_shell(model, slow) as shell:
        idle, busy = await shell.open_stream(), await shell.open_stream()
        event = submission(busy, 40)
        await shell.post(event)
        await listen(busy, [event.key.handle])
        assert idle.backlog_count == 1


async def test_a_failed_step_ends_its_batch_and_nothing_else(model: Path) -> None:
    def fail_third(step: int) -> None:
        if step == 3:
            raise RuntimeError("the matrix is full")

    async with running_shell(model, fail_third, max_running_count=2) as shell:
        stream = await shell.open_stream()
        events = [submission(stream, 10) for _ in range(4)]
        for event in events:
            await shell.post(event)
        heard = await listen(stream, [event.key.handle for event in events])
        *failed, third, fourth = (heard[event.key.handle] for event in events)
        for one in failed:
            assert reason(one) is FinishReason.ERROR
            assert one.ending is not None
            assert "RuntimeError: the matrix is full" in one.ending.error
            assert not one.ending.invalid
        assert reason(third) is reason(fourth) is FinishReason.LENGTH
        assert third.token_ids == fourth.token_ids
        assert len(third.token_ids) == 10
        assert failed[0].token_ids == third.token_ids[: len(failed[0].token_ids)]
        await until(lambda: held(shell.load()) == NOTHING_HELD)


def test_steps_that_fail_in_a_row_end_the_shell(model: Path) -> None:
    def fail(step: int) -> None:
        raise RuntimeError(f"step {step}")

    async def story() -> None:
        async with running_shell(model, fail, max_running_count=1) as shell:
            stream = await shell.open_stream()
            for _ in range(3):
                await shell.post(submission(stream, 10))
            assert await stream.next() is not None
            await until(lambda: False)

    with pytest.raises(ExceptionGroup) as caught:
        play(story())
    assert caught.group_contains(InvariantViolation, match="3 engine steps in a row have failed.*step 3")


def test_a_broken_invariant_of_the_engine_is_no_failed_step(model: Path) -> None:
    def break_down(step: int) -> None:
        raise InvariantViolation("a block belongs to two")

    async def story() -> None:
        async with running_shell(model, break_down) as shell:
            stream = await shell.open_stream()
            await shell.post(submission(stream, 10))
            await until(lambda: False)

    with pytest.raises(ExceptionGroup) as caught:
        play(story())
    assert caught.group_contains(InvariantViolation, match="a block belongs to two")


def test_a_shell_that_cannot_be_closed_reports_it(model: Path) -> None:
    """If the failure were not reported, the worker would seem to be alive, and its caller would wait for it forever."""

    def break_down(step: int) -> None:
        raise InvariantViolation("a block belongs to two")

    async def story() -> None:
        async with running_shell(model, break_down) as shell:
            close = shell._engine.close

            def close_and_fail() -> None:
                close()
                raise DeadlineExceeded("links have not ended")

            shell._engine.close = close_and_fail
            stream = await shell.open_stream()
            await shell.post(submission(stream, 10))
            await until(lambda: False)

    with pytest.raises(ExceptionGroup) as caught:
        play(story())
    assert caught.group_contains(InvariantViolation, match="a block belongs to two")


async def test_a_drain_finishes_running_requests_and_refuses_new_ones(model: Path) -> None:
    async with running_shell(model, slow, max_running_count=1) as shell:
        stream = await shell.open_stream()
        before = [submission(stream, 20) for _ in range(2)]
        for event in before:
            await shell.post(event)
        await until(lambda: shell.load().running_count == 1)
        shell.drain()
        shell.drain()
        late = submission(stream, 20)
        await shell.post(late)
        heard = await listen(stream, [event.key.handle for event in (*before, late)])
        for event in before:
            assert len(heard[event.key.handle].token_ids) == 20
        ending = heard[late.key.handle].ending
        assert ending is not None
        assert ending.refused
        assert "draining" in ending.error
        await asyncio.wait_for(shell.drained.wait(), 5.0)
        assert shell.load().draining


async def test_an_idle_worker_is_drained_at_once(model: Path) -> None:
    async with running_shell(model) as shell:
        shell.drain()
        await asyncio.wait_for(shell.drained.wait(), 5.0)


async def test_stopping_during_work_leaves_nothing_behind(model: Path) -> None:
    async with running_shell(model, slow) as shell:
        stream = await shell.open_stream()
        for _ in range(12):
            await shell.post(submission(stream, LONG))
        await until(lambda: shell.load().running_count == 8)
    while await stream.next() is not None:
        pass


def test_cancelling_the_shell_waits_for_its_thread(model: Path) -> None:
    async def story() -> None:
        async with running_shell(model, slow) as shell:
            stream = await shell.open_stream()
            await shell.post(submission(stream, LONG))
            await until(lambda: shell.load().running_count == 1)
            raise KeyError("something else went wrong")

    with pytest.raises(ExceptionGroup) as caught:
        play(story())
    assert caught.group_contains(KeyError)


def test_a_hanging_step_does_not_prevent_the_worker_from_ending(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_module, "_LAST_STEP_S", 0.2)

    async def story() -> None:
        async with running_shell(model, lambda step: time.sleep(2.0)) as shell:
            stream = await shell.open_stream()
            await shell.post(submission(stream, 1))
            await until(lambda: shell.load().step_age_s > 0.05)

    with pytest.raises(ExceptionGroup) as caught:
        play(story())
    assert caught.group_contains(InvariantViolation, match=r"has not ended within 0\.2 s")


async def test_the_load_report_shows_the_age_of_a_hanging_step(model: Path) -> None:
    gate = Gate()
    async with running_shell(model, gate) as shell:
        assert shell.load().step_age_s == 0.0
        stream = await shell.open_stream()
        event = submission(stream, 3)
        await shell.post(event)
        await until(gate.entered.is_set)
        await until(lambda: shell.load().step_age_s > 0.1)
        first_s = shell.load().step_age_s
        await until(lambda: shell.load().step_age_s > first_s)
        gate.open()
        await listen(stream, [event.key.handle])
        assert shell.load().step_age_s == 0.0


async def test_a_full_inbox_makes_callers_wait(model: Path) -> None:
    gate = Gate()
    async with running_shell(model, gate) as shell:
        stream = await shell.open_stream()
        event = submission(stream, 3)
        await shell.post(event)
        await until(gate.entered.is_set)
        posted: list[Aborted] = []
        stale = Aborted(time.monotonic(), SequenceKey(stream.stream_id, 10**9))

        async def keep_posting() -> None:
            while True:
                await shell.post(stale)
                posted.append(stale)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(keep_posting(), 1.0)
        assert INBOX_EVENTS - 2 <= len(posted) <= INBOX_EVENTS
        gate.open()
        await shell.post(stale)
        heard = await listen(stream, [event.key.handle])
        assert len(heard[event.key.handle].token_ids) == 3


async def test_a_dispatcher_that_stops_waiting_for_a_full_inbox_leaves_no_stream(model: Path) -> None:
    gate = Gate()
    async with running_shell(model, gate) as shell:
        stream = await shell.open_stream()
        await shell.post(submission(stream, 3))
        await until(gate.entered.is_set)
        stale = Aborted(time.monotonic(), SequenceKey(stream.stream_id, 10**9))
        while not shell._slots.locked():
            await shell.post(stale)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(shell.open_stream(), 0.1)
        gate.open()
        assert shell.stream_count == 1


async def test_the_report_states_which_requests_it_counts(model: Path) -> None:
    """A request in its prefill has no tokens to report yet, but is part of the load."""

    async with running_shell(model, slow, max_batch_tokens=8) as shell:
        stream = await shell.open_stream()
        event = submission(stream, 1, prompt=[7] * 250)
        await shell.post(event)
        output = await stream.next()
        while output is not None and output.load.running_count == 0:
            assert output.seen_handle == 0
            output = await stream.next()
        assert output is not None
        assert output.emit is None
        assert output.seen_handle == event.key.handle


async def test_a_request_that_others_have_overtaken_hides_none_of_them(model: Path) -> None:
    gate = Gate()
    async with running_shell(model, gate, max_batch_tokens=8) as shell:
        stream = await shell.open_stream()
        await shell.post(submission(stream, 1, prompt=[7] * 250))
        await asyncio.to_thread(gate.entered.wait)
        overtaken, newest = (submission(stream, 1, prompt=[7] * 250) for _ in range(2))
        await shell.post(newest)
        await shell.post(replace(overtaken, overtaken=True))
        gate.open()
        output = await stream.next()
        while output is not None and output.load.running_count + output.load.waiting_count < 3:
            output = await stream.next()
        assert output is not None
        assert output.emit is None
        assert output.seen_handle == newest.key.handle


async def test_a_report_of_an_idle_worker_follows_its_memory(model: Path) -> None:
    """A worker releases its memory for parking without an event, as soon as no peer reads from it any more."""

    async with running_shell(model, slow) as shell:
        before = shell.load().memory
        assert before.kv_bytes
        await asyncio.sleep(0.1)
        shell._engine.memory_report = lambda: replace(before, kv_bytes=0)
        await until(lambda: not shell.load().memory.kv_bytes)


async def test_ended_requests_leave_no_state(model: Path) -> None:
    async with running_shell(model, max_running_count=2) as shell:
        stream = await shell.open_stream()
        events = [submission(stream, 2) for _ in range(30)]
        for event in events:
            await shell.post(event)
        await listen(stream, [event.key.handle for event in events])
        assert len(shell._turns.texts) <= 2


async def test_a_malformed_request_is_answered_on_its_stream(model: Path) -> None:
    async with running_shell(model, undisturbed) as shell:
        stream = await shell.open_stream()
        good, bad = submission(stream, 3), submission(stream, 3)
        await shell.post(good)
        await shell.post(replace(bad, prompt_token_ids=(10**6,)))
        heard = await listen(stream, [good.key.handle, bad.key.handle])
        assert reason(heard[good.key.handle]) is FinishReason.LENGTH
        ending = heard[bad.key.handle].ending
        assert ending is not None
        assert ending.invalid
        assert "1000000" in ending.error
