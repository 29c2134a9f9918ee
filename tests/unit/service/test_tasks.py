import asyncio
import gc
import itertools

import pytest

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.service.metrics import TASK_FAILURES
from ballast.service.tasks import Work, run_supervised, unless_it_fails


def test_requested_work_is_done_before_the_group_ends() -> None:
    done: list[int] = []

    async def note(number: int) -> None:
        await asyncio.sleep(0)
        done.append(number)

    async def story() -> None:
        async with Work() as work:
            work.start(note(1), "one")
            work.start(note(2), "two")

    asyncio.run(story())
    assert sorted(done) == [1, 2]


def test_an_ended_group_starts_no_task_and_leaves_none() -> None:
    begun: list[bool] = []

    async def late() -> None:
        begun.append(True)

    async def story() -> None:
        async with Work() as work:
            pass
        work.start(late(), "late")
        gc.collect()  # a coroutine that was never awaited would cause a warning here
        await asyncio.sleep(0)

    asyncio.run(story())
    assert not begun


def test_a_task_cancelled_before_its_start_leaves_nothing() -> None:
    begun: list[bool] = []

    async def late() -> None:
        begun.append(True)

    async def story() -> None:
        async with Work() as work:
            work.start(late(), "late")
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)):
        asyncio.run(story())
    gc.collect()
    assert not begun


def test_using_a_group_before_entering_it_is_a_bug() -> None:
    async def work() -> None: ...

    with pytest.raises(RuntimeError, match="has not been entered"):
        Work().start(work(), "early")


def failures(task: str) -> float:
    samples = [sample for metric in TASK_FAILURES.collect() for sample in metric.samples]
    return sum(s.value for s in samples if s.labels["task"] == task and s.name.endswith("_total"))


@pytest.mark.parametrize(
    "error", [RuntimeError("unable to perform operation on <TCPTransport closed=True>"), KeyError("x"), OSError("gone")]
)
def test_a_loop_that_fails_is_restarted_and_counted(error: Exception) -> None:
    begun: list[float] = []

    async def fails_twice() -> None:
        begun.append(asyncio.get_running_loop().time())
        if len(begun) < 3:
            raise error

    async def story() -> None:
        async with Work() as work:
            work.keep(fails_twice, "shaky")

    before = failures("shaky")
    asyncio.run(story())
    assert failures("shaky") - before == 2
    first_s, second_s = (late - early for early, late in itertools.pairwise(begun))
    assert 0.05 < first_s < second_s


def test_a_cancelled_call_does_not_end_its_waiting_task() -> None:
    """gRPC raises CancelledError for a cancelled call, although the task itself was not cancelled."""
    begun: list[bool] = []

    async def story() -> None:
        again = asyncio.Event()

        async def waits() -> None:
            begun.append(True)
            call = asyncio.ensure_future(asyncio.sleep(60))
            if len(begun) == 1:
                call.cancel()
            else:
                again.set()
            await call

        kept = asyncio.create_task(run_supervised(waits, "waits"))
        async with asyncio.timeout(20):
            await again.wait()
        kept.cancel()
        with pytest.raises(asyncio.CancelledError):
            await kept

    asyncio.run(story())


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("error", [InvariantViolation("blocks do not add up"), ConfigError("port", "taken")])
def test_fatal_errors_end_a_service(error: Exception, is_grouped: bool) -> None:
    async def broken() -> None:
        if is_grouped:
            raise ExceptionGroup("inner", [KeyError("beside it"), error])
        raise error

    async def story() -> None:
        async with Work() as work:
            work.keep(broken, "broken")

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(story())
    assert caught.value.subgroup(type(error)) is not None


def test_a_single_failure_is_counted_and_other_tasks_continue() -> None:
    done: list[str] = []

    async def fails() -> None:
        raise ValueError("a word of a stranger")

    async def goes_on() -> None:
        await asyncio.sleep(0.01)
        done.append("all")

    async def story() -> None:
        async with Work() as work:
            work.start(goes_on(), "goes on")
            work.start(fails(), "fails")
        assert await unless_it_fails(answer(), 0) == 0

    async def answer() -> int:
        raise KeyError("no such outcome")

    asyncio.run(story())
    assert done == ["all"]
    assert failures(fails.__qualname__) >= 1
    assert failures(answer.__qualname__) >= 1
