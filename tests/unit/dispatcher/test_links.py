"""A link to a worker goes on whatever it meets."""

import asyncio

import grpc.aio
import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import DispatcherId, Incarnation, WorkerId
from services.dispatcher.__main__ import MonotonicClock
from services.dispatcher.core.events import Event, WorkerLost
from services.dispatcher.policy.freeness import WorkerKey
from services.dispatcher.shell.links import Identity, WorkerLink


def link_that_meets(error: Exception, met: list[Event]) -> WorkerLink:
    def dial(_: str) -> grpc.aio.Channel:
        raise error

    return WorkerLink(
        WorkerKey(WorkerId("w"), Incarnation(1)),
        "127.0.0.1:1",
        identity=Identity(DispatcherId("d"), Incarnation(1)),
        clock=MonotonicClock(),
        feed=met.append,
        connect_timeout_s=1.0,
        dial=dial,
    )


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a field"),
        ValueError("a certificate"),
        grpc.aio.UsageError("called in a wrong way"),
        RuntimeError("unable to perform operation on <TCPTransport closed=True>"),
    ],
)
def test_an_error_that_nobody_expects_is_the_loss_of_the_worker(error: Exception) -> None:
    met: list[Event] = []

    async def story() -> None:
        running = asyncio.create_task(link_that_meets(error, met).run())
        await asyncio.wait([running], timeout=0.5)
        assert not running.done(), running.exception()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())
    assert len(met) > 1, "it tries again"
    assert all(isinstance(event, WorkerLost) for event in met)


async def test_a_broken_invariant_is_not_taken_for_a_worker_that_is_lost() -> None:
    met: list[Event] = []
    with pytest.raises(InvariantViolation, match="two owners"):
        await link_that_meets(InvariantViolation("two owners"), met).run()
    assert not met
