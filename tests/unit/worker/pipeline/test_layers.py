"""A loaded layer is compared with the checksum that this worker knows, and refused if it differs."""

import queue
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ballast.common.errors import Overloaded
from ballast.common.ids import Epoch, WorkerId
from services.worker.core.turns import MemberEvent
from services.worker.engine.load import load_engine
from services.worker.memory.backend import Algorithm
from services.worker.memory.host import HostBackend
from services.worker.pipeline.background import Threads
from services.worker.pipeline.events import LayerArrived, LayerAsked, LayerChecked
from services.worker.pipeline.hub import Destinations
from services.worker.pipeline.layers import LayerLoading, LayerPull, LayerServer
from services.worker.pipeline.progress import TransitionProgress
from services.worker.pipeline.wire import Topic
from tests.support.engine import NEEDS_NATIVE
from tests.unit.worker.memory.models import fill_layer, open_small
from tools.model.tiny import make_tiny


@pytest.mark.parametrize("changed", [False, True], ids=["as it was", "replaced meanwhile"])
@pytest.mark.parametrize("known", [False, True], ids=["never held", "held before"])
def test_a_layer_from_the_checkpoint_is_compared_with_the_known_checksum(changed: bool, known: bool) -> None:
    events: queue.SimpleQueue[MemberEvent] = queue.SimpleQueue()
    with open_small(HostBackend()) as memory:
        parameters = memory.parameters

        def read(layer: int) -> bool:
            fill_layer(memory, layer)
            if changed:
                parameters.layer(layer)["down"][-1, -1] += 1.0
            return False

        workers = Threads(lambda _: False, read, lambda _: None)
        server = LayerServer(parameters, workers, events.put)
        fill_layer(memory, 1)
        if known:
            server.checksum(1)
        pull = LayerPull(
            Epoch(3),
            {1: ()},
            TransitionProgress(epoch=Epoch(3), began_s=0.0),
            hub=cast(Any, None),  # no peer is asked
            ask=lambda peer, layer: False,
            server=server,
            hurried=lambda: True,
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
        workers.shutdown()
    wrong = changed and known
    assert bool(pull.failure) == wrong
    assert (pull.progress.repulled_layers > 0) == wrong


@pytest.mark.parametrize("by", Algorithm)
def test_a_layer_from_a_peer_is_verified_with_the_peers_algorithm(by: Algorithm) -> None:
    """One side may compute the checksum on a GPU and the other on a CPU."""
    events: queue.SimpleQueue[MemberEvent] = queue.SimpleQueue()
    asked: list[WorkerId] = []
    peers = [WorkerId("w2"), WorkerId("w3")]
    with open_small(HostBackend()) as memory, open_small(HostBackend()) as there:
        fill_layer(there, 1)
        right = there.parameters.layer_checksum(1, by=by)
        workers = Threads(lambda _: False, lambda _: False, lambda _: None)

        def ask(peer: WorkerId, layer: int) -> bool:
            asked.append(peer)
            fill_layer(memory, layer)
            if peer == "w2":
                memory.parameters.layer(layer)["down"][-1, -1] += 1.0
            return True

        pull = LayerPull(
            Epoch(3),
            {1: peers},
            TransitionProgress(epoch=Epoch(3), began_s=0.0),
            hub=cast(Any, SimpleNamespace(places=Destinations())),
            ask=ask,
            server=LayerServer(memory.parameters, workers, events.put),
            hurried=lambda: True,
        )
        pull.go_on()
        for peer in peers:
            pull.arrived(LayerArrived(Epoch(3), 1, peer, right, by=by))
            checked = events.get(timeout=30)
            assert isinstance(checked, LayerChecked)
            pull.checked(checked)
        workers.shutdown()
    assert asked == peers
    assert (pull.progress.repulled_layers, pull.finished) == (1, True)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_copy_in_host_memory_is_preferred_to_peers(is_right: bool) -> None:
    """No peer is asked. If the copy was damaged, it has been replaced from the checkpoint, which is verified."""
    events: queue.SimpleQueue[MemberEvent] = queue.SimpleQueue()
    with open_small(HostBackend()) as memory:
        workers = Threads(lambda _: True, lambda _: is_right, lambda _: None)
        server = LayerServer(memory.parameters, workers, events.put)
        fill_layer(memory, 1)
        server.checksum(1)

        def ask(peer: WorkerId, layer: int) -> bool:
            raise AssertionError(f"{peer} is asked")

        pull = LayerPull(
            Epoch(3),
            {1: [WorkerId("w2")]},
            TransitionProgress(epoch=Epoch(3), began_s=0.0),
            hub=cast(Any, None),
            ask=ask,
            server=server,
            hurried=lambda: True,
        )
        pull.go_on()
        arrived = events.get(timeout=30)
        assert isinstance(arrived, LayerArrived)
        pull.arrived(arrived)
        if not is_right:
            checked = events.get(timeout=30)
            assert isinstance(checked, LayerChecked)
            pull.checked(checked)
        workers.shutdown()
        assert pull.finished


class _Sent:
    """A link that records refusals and transferred layers."""

    peer_id = "w2"

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.layers: queue.SimpleQueue[int] = queue.SimpleQueue()

    def send(self, traffic: object, topic: Topic, *, meta: bytes, stream: int) -> None:
        assert topic is Topic.LAYER_REFUSED
        self.refusals.append(meta.decode())

    def transfer(self, traffic: object, pieces: object, *, topic: Topic, meta: bytes, stream: int) -> Any:
        self.layers.put(stream)
        done: Future[None] = Future()
        done.set_result(None)
        return SimpleNamespace(done=done)


@NEEDS_NATIVE
def test_a_peer_with_another_weight_packing_is_refused_with_the_reason(tmp_path: Path) -> None:
    """The peer could not use these bytes; it reads the checkpoint instead."""
    model = make_tiny("llama", tmp_path / "model", layers=2)
    with (
        load_engine(model, device_memory_bytes=16 << 20, kernels="native") as packed,
        load_engine(model, device_memory_bytes=16 << 20, kernels="torch") as plain,
    ):
        parameters = packed.memory.parameters
        theirs = plain.memory.parameters.layout(1)
        assert parameters.layout(0) == parameters.layout(1) != theirs
        workers, link = Threads(lambda _: False, lambda _: False, lambda _: None), _Sent()
        context = SimpleNamespace(
            role=SimpleNamespace(layer_count=2),
            memory=packed.memory,
            book=None,
            hub=None,
            links=SimpleNamespace(ask_for_layer=None),
            now=lambda: 0.0,
            post=queue.SimpleQueue[MemberEvent]().put,
        )
        home = LayerLoading(cast(Any, context), background=workers, hurried=lambda: True)
        home.server.serve(LayerAsked(Epoch(3), 1, cast(Any, link), theirs), range(2))
        assert "--kernels" in link.refusals[0]
        home.server.serve(LayerAsked(Epoch(3), 1, cast(Any, link), parameters.layout(1)), range(2))
        assert link.layers.get(timeout=30) == 1
        assert len(link.refusals) == 1
        workers.shutdown()


@pytest.mark.parametrize("is_full", [False, True])
def test_a_peer_is_notified_if_its_layer_cannot_be_read(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is notified. If its link accepts no message, the link ends."""

    class Link(_Sent):
        def send(self, traffic: object, topic: Topic, *, meta: bytes, stream: int) -> None:
            if is_full:
                raise Overloaded("256 messages are unsent", 0.01)
            super().send(traffic, topic, meta=meta, stream=stream)

        def give_up(self, why: str) -> None:
            self.refusals.append(why)

    def fetch(layer: int) -> None:
        raise OSError("another host does not answer")

    with open_small(HostBackend()) as memory:
        fill_layer(memory, 1)
        monkeypatch.setattr(memory.parameters, "fetch", fetch)
        workers, link = Threads(lambda _: False, lambda _: False, lambda _: None), Link()
        events: queue.SimpleQueue[MemberEvent] = queue.SimpleQueue()
        LayerServer(memory.parameters, workers, events.put).send(cast(Any, link), Epoch(3), 1)
        events.get(timeout=30)  # the job has failed
        workers.shutdown()
    assert link.refusals == (["a layer could not be refused: 256 messages are unsent"] if is_full else [""])


def test_a_drop_never_waits_for_checksums_of_loaded_layers(tmp_path: Path) -> None:
    """SHA-256 of gigabytes takes seconds, so checksums are computed while the checkpoint is read."""
    model_dir = make_tiny("llama", tmp_path / "model", layers=3, vocab=320)
    with load_engine(model_dir, device_memory_bytes=8 << 20) as engine:
        parameters = engine.memory.parameters
        started: list[object] = []
        workers = SimpleNamespace(submit=started.append)
        server = LayerServer(parameters, cast(Any, workers), lambda _: None)
        server.learn([0, 2])
        server.learn_each([0, 1, 2])
        assert started == []
        assert [server.known_checksum(i) for i in range(3)] == [parameters.layer_checksum(i) for i in range(3)]
