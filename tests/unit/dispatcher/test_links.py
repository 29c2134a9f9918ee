"""A link to a worker survives any error: it reports the worker lost and tries again."""

import asyncio

import grpc.aio
import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import DispatcherId, Incarnation, WorkerId
from ballastpb.worker.v1 import worker_pb2 as pb
from services.dispatcher.__main__ import MonotonicClock
from services.dispatcher.core.events import Event, StepReceived, WorkerLost
from services.dispatcher.policy.freeness import WorkerKey
from services.dispatcher.shell.links import Identity, WorkerLink
from services.worker.core.events import Emit
from services.worker.output_stream import Output
from services.worker.servicer import step_to_proto
from tests.support.dispatcher_core import load


def link_that_meets(error: Exception, met: list[Event]) -> WorkerLink:
    def dial(_: str) -> grpc.aio.Channel:
        raise error

    return WorkerLink(
        WorkerKey(WorkerId("w"), Incarnation(1)),
        "127.0.0.1:1",
        identity=Identity(DispatcherId("d"), Incarnation(1)),
        clock=MonotonicClock(),
        feed=met.append,
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
def test_an_unexpected_error_counts_as_the_loss_of_the_worker(error: Exception) -> None:
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


def test_a_workers_report_of_a_step_arrives_unchanged() -> None:
    met: list[Event] = []
    link = link_that_meets(KeyError(), met)
    emit = Emit(1, (5, 6), (1, 2), (7, 8, 9), ("x", ""), (), (), 9, preempted=(6, 3), resumed=(4,))
    said = step_to_proto(Output(emit, load(waiting_count=2), 9))
    heard = link._decode(pb.AttachResponse(step=pb.StepOutput.FromString(said.SerializeToString())))
    assert heard == StepReceived(
        heard.at_s, heard.worker, [5, 6], [1, 2], [7, 8, 9], ["x", ""], heard.logprobs, (), heard.load, 9, (6, 3), (4,)
    )
    assert heard.load.waiting_count == 2
    said.ClearField("preempted_handles")
    said.ClearField("resumed_handles")
    of_older = link._decode(pb.AttachResponse(step=said))
    assert (of_older.preempted, of_older.resumed) == ((), ())


async def test_a_broken_invariant_is_not_reported_as_a_lost_worker() -> None:
    met: list[Event] = []
    with pytest.raises(InvariantViolation, match="two owners"):
        await link_that_meets(InvariantViolation("two owners"), met).run()
    assert not met
