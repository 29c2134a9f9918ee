"""A worker whose parameters do not fit into host memory continues to serve."""

from concurrent.futures import Future
from unittest.mock import Mock

from services.worker.pipeline.events import ParkOrdered
from services.worker.pipeline.parking import Parking


def failed(_layer: int) -> Future[None]:
    job = Future[None]()
    job.set_exception(MemoryError("host memory is full"))
    return job


def test_a_failed_copy_to_host_memory_crashes_no_worker_and_is_not_repeated() -> None:
    context, background, layers, serve = Mock(), Mock(), Mock(), Mock()
    context.memory.can_park, context.role.layer_count = True, 2
    context.memory.parameters.layer_count, context.memory.parameter_bytes_of.return_value = 2, 1 << 30
    background.keep.side_effect = failed
    parking = Parking(context, background, layers, why_not=lambda: "", serve=serve)
    assert parking.parks.wake_s > 0
    parking.ordered(ParkOrdered(park=True))
    assert parking.under_way
    parking.poll()
    assert not parking.under_way
    assert (parking.parks.parked, parking.parks.wake_s) == (False, 0.0)
    assert [call.args[0].leads for call in context.answers.tell.call_args_list] == [False, True]
    serve.assert_not_called()  # there is no room for a new group, because its memory was not released
    parking.ordered(ParkOrdered(park=True))
    assert not parking.under_way
