"""The order in which copies and kernels are issued to a GPU, with a fake driver whose events the test completes."""

import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import ClassVar, cast

import pytest
import torch
from torch.distributed import Work

from services.worker.links.channels.nccl import CudaStream
from services.worker.links.copies import HOST, HostCopies
from services.worker.links.cuda_copies import CudaCopies, copies_for
from services.worker.links.pieces import Pieces
from services.worker.memory.backend import SLOT_BYTES
from tests.support.host_gatherer import HostGatherer

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.waits_for = list[Event]()


class Event:
    """A fake CUDA event that completes when the test says so. It must be a blocking one."""

    made: ClassVar[list["Event"]] = []

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "waiting for a non-blocking event would spin"
        self._come = threading.Event()
        self.failed = False
        Event.made.append(self)

    def record(self, stream: Stream) -> None:
        self.on = stream

    def wait(self, stream: Stream) -> None:
        stream.waits_for.append(self)

    def synchronize(self) -> None:
        assert self._come.wait(20.0)
        if self.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def come(self, *, failed: bool = False) -> None:
        self.failed = failed
        self._come.set()


class Driver:
    def __init__(self) -> None:
        self.engine = Stream(GPU)
        self._current = threading.local()

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self._current, "stream", self.engine)

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        before = self.current_stream(GPU)
        self._current.stream = stream
        yield
        self._current.stream = before


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    Event.made = []
    for name, value in (("Stream", Stream), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "stream", driver.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", driver.current_stream)

    def empty(self: CudaCopies, size_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    monkeypatch.setattr(CudaCopies, "empty", empty)
    return driver


def test_sends_are_copied_after_their_computation_and_then_reported(driver: Driver) -> None:
    copies, told = CudaCopies(GPU), Future[torch.Tensor | None]()
    payload = torch.arange(9, dtype=torch.uint8, device="meta")
    streams = list[Stream]()

    class There(torch.Tensor):
        def copy_(self, *_: object, **__: object) -> torch.Tensor:
            streams.append(driver.current_stream(GPU))
            return self

    copies.empty = lambda size_bytes, device: torch.empty(size_bytes, dtype=torch.uint8).as_subclass(There)  # type: ignore[method-assign]
    copies.fetch(payload, HOST, told.set_result)
    computed, copied = Event.made
    assert computed.on is driver.engine
    assert streams == [copied.on]
    assert copied.on is not driver.engine
    assert copied.on.waits_for == [computed]
    computed.come()
    with pytest.raises(TimeoutError):
        told.result(0.05)
    copied.come()
    assert isinstance(told.result(20), There)
    copies.close()


def test_direct_sends_are_reported_once_computed(driver: Driver) -> None:
    copies, told = CudaCopies(GPU), Future[torch.Tensor | None]()
    payload = torch.arange(9, dtype=torch.uint8)
    copies.fetch(payload, HOST, told.set_result)  # the payload is in host memory already
    [computed] = Event.made
    with pytest.raises(TimeoutError):
        told.result(0.05)
    computed.come()
    assert told.result(20) is payload
    copies.close()


def test_failed_computations_are_reported_and_so_are_later_ones(driver: Driver) -> None:
    copies, told = CudaCopies(GPU), [Future[torch.Tensor | None](), Future[torch.Tensor | None]()]
    for future in told:
        copies.fetch(torch.zeros(1, dtype=torch.uint8), HOST, future.set_result)
    Event.made[0].come(failed=True)
    Event.made[1].come()
    copies.close()  # pending fetches report first
    assert told[0].result(0) is None
    assert told[1].result(0) is not None
    assert not any(thread.name.startswith("links-fetch") for thread in threading.enumerate())


def test_copies_wait_for_no_kernel_and_have_ended_on_return_even_if_one_fails(driver: Driver) -> None:
    copies, streams = CudaCopies(GPU), list[Stream]()

    def copy() -> None:
        with copies.copying():
            streams.append(driver.current_stream(GPU))
            raise ValueError("the second of two copies")

    def fails() -> None:
        with pytest.raises(ValueError, match="the second"):
            copy()

    threads = [threading.Thread(target=fails) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + 20
    while len(Event.made) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.002)
    threads[0].join(0.05)
    assert all(thread.is_alive() for thread in threads), "must wait for copies that may still write"
    for event in Event.made:
        event.come()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len({id(stream) for stream in streams}) == 2, "each thread must copy on its own stream"
    assert all(event.on is not driver.engine for event in Event.made)
    assert not any(stream.waits_for for stream in streams)


def test_blocks_of_a_slot_are_gathered_by_one_launch_and_copied_at_once(driver: Driver) -> None:
    copies = CudaCopies(GPU)
    copies._kernel = kernel = HostGatherer(lambda: driver.current_stream(GPU))
    empty = torch.empty

    def on_device(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == GPU
        return empty(size, dtype=dtype)

    memory = torch.arange(3 * SLOT_BYTES, dtype=torch.int64).to(torch.uint8)
    blocks = list(memory.split(60 << 10))[::2]
    pieces, size = Pieces(blocks, "blocks"), SLOT_BYTES + 1000
    slot, wanted = torch.zeros(size, dtype=torch.uint8), memory.clone()
    done = Future[None]()

    def both() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", on_device)
            copies.gather(pieces, 777, slot)
            for block in blocks:
                block.zero_()
            copies.scatter(pieces, 777, slot)
        done.set_result(None)

    threading.Thread(target=both, daemon=True).start()
    for nth in (1, 2):
        deadline_s = time.monotonic() + 20
        while len(Event.made) < nth and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert not done.done()
        Event.made[-1].come()
    done.result(20)
    assert [(which, count > 100) for which, count, _ in kernel.launches] == [
        ("gather", True),
        ("gather", False),
        ("scatter", True),
        ("scatter", False),
    ]
    assert {stream for _, _, stream in kernel.launches} == {event.on for event in Event.made} != {driver.engine}
    assert torch.equal(slot, torch.cat(list(wanted.split(60 << 10))[::2])[777 : 777 + size])
    left = torch.cat(blocks)
    assert torch.equal(left[777 : 777 + size], slot)
    assert not left[:777].any()
    assert not left[777 + size :].any()


def test_waiting_for_a_communicator_happens_in_the_driver_without_polling(
    driver: Driver,
) -> None:
    behind_it = list[Stream]()
    finished = Future[None]()

    class Moving:
        """Has only `synchronize`: any other query would fail."""

        def synchronize(self) -> None:
            behind_it.append(driver.current_stream(GPU))

    def finish() -> None:
        stream = CudaStream(GPU)
        with stream.current():
            stream.finish(cast(Work, Moving()))
        finished.set_result(None)

    thread = threading.Thread(target=finish, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 20
    while not Event.made and time.monotonic() < deadline_s:
        time.sleep(0.001)
    [event] = Event.made
    assert behind_it == [event.on] != [driver.engine]
    assert not finished.done()
    event.come()
    finished.result(20)


def test_on_the_host_nothing_is_waited_for() -> None:
    copies = copies_for(HOST)
    assert isinstance(copies, HostCopies)
    assert copies.mark() is None
    assert isinstance(copies_for(GPU), CudaCopies)
