"""What comes from the disk is what this worker has known, or it is not taken."""

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from ballast.common.ids import Epoch
from services.worker.memory.host import HostBackend
from services.worker.pipeline.events import LayerArrived, LayerChecked
from services.worker.pipeline.layers import LayerPull, LayerServer
from services.worker.shell import MemberEvent
from tests.unit.worker.memory.models import fill_layer, open_small


@pytest.mark.parametrize("changed", [False, True], ids=["as it was", "replaced meanwhile"])
@pytest.mark.parametrize("known", [False, True], ids=["never held", "held before"])
def test_a_layer_from_the_checkpoint_is_compared_with_what_is_known(changed: bool, known: bool) -> None:
    events: queue.SimpleQueue[MemberEvent] = queue.SimpleQueue()
    with open_small(HostBackend()) as memory, ThreadPoolExecutor(1) as workers:
        parameters = memory.parameters
        server = LayerServer(parameters, workers, events.put)
        fill_layer(memory, 1)
        if known:
            server.checksum(1)

        def read(layer: int) -> None:
            fill_layer(memory, layer)
            if changed:
                parameters.layer(layer)["down"][-1, -1] += 1.0

        pull = LayerPull(
            Epoch(3),
            [1],
            {},
            parameters=parameters,
            hub=cast(Any, None),  # of links to peers, whom nobody asks here
            ask=lambda peer, layer: False,
            read=read,
            server=server,
            workers=workers,
            hurried=lambda: True,
            post=events.put,
        )
        pull.go_on()
        while not (pull.finished or pull.failure):
            event = events.get(timeout=30)
            match event:
                case LayerArrived():
                    pull.arrived(event)
                case LayerChecked():
                    pull.checked(event)
                case _:
                    raise AssertionError(event)
    wrong = changed and known
    assert bool(pull.failure) == wrong
    assert (pull.repulled > 0) == wrong
