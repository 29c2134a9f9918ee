import asyncio
import gc

import pytest

from ballast.service.tasks import Work


def test_what_is_asked_for_is_done_before_the_group_ends() -> None:
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


def test_nothing_is_begun_once_it_has_ended_and_nothing_is_left() -> None:
    begun: list[bool] = []

    async def late() -> None:
        begun.append(True)

    async def story() -> None:
        async with Work() as work:
            pass
        work.start(late(), "late")
        gc.collect()  # a coroutine that nobody has awaited would be complained about here
        await asyncio.sleep(0)

    asyncio.run(story())
    assert not begun


def test_a_group_that_nobody_has_entered_is_a_bug() -> None:
    async def work() -> None: ...

    with pytest.raises(RuntimeError, match="has not been entered"):
        Work().start(work(), "early")
