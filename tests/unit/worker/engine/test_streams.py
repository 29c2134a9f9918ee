"""The stream on which an engine computes, with fake streams."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.core.batch import Batch
from services.worker.engine import load
from services.worker.engine.decode_graphs import CudaRecord
from services.worker.engine.load import load_engine
from services.worker.engine.rehearsal import Largest
from services.worker.engine.runner import ModelRunner
from services.worker.memory import streams
from services.worker.memory.host import HostBackend
from tests.support.engine import Job, generate
from tests.support.shells import listen, running_shell, submission

GPU = torch.device("cuda", 1)


class Stream:
    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device = device
        self.priority = priority

    def synchronize(self) -> None:
        """Returns at once: nothing is ever pending."""


class Driver:
    """The current device and stream of each thread, as torch keeps them."""

    def __init__(self) -> None:
        self.made: list[Stream] = []
        self._of_thread = threading.local()

    def make(self, device: torch.device, priority: int = 0) -> Stream:
        self.made.append(Stream(device, priority))
        return self.made[-1]

    def set_device(self, device: torch.device) -> None:
        self._of_thread.device = device

    def set_stream(self, stream: Stream) -> None:
        assert self._of_thread.device == stream.device, "Triton would launch on another device"
        self._of_thread.stream = stream

    def current(self, device: torch.device = GPU) -> Stream | None:
        """The thread's stream; None: the default stream."""
        return getattr(self._of_thread, "stream", None)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("Stream", driver.make), ("set_device", driver.set_device), ("set_stream", driver.set_stream)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", driver.current)
    return driver


@pytest.fixture
def as_on_a_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Gives engines on the CPU a stream."""

    def own_stream(device: torch.device) -> Callable[[], None]:
        return streams.own_stream(GPU)

    monkeypatch.setattr(load, "own_stream", own_stream)
    return driver


def test_the_engines_stream_is_its_own_and_has_priority(driver: Driver) -> None:
    """torch assigns 32 streams of each priority in rotation. All other streams here have the default priority."""
    enter = streams.own_stream(GPU)
    [stream] = driver.made
    assert stream.priority < Stream(GPU).priority
    assert driver.current() is None
    enter()
    assert driver.current() is stream
    streams.own_stream(GPU)
    assert len(driver.made) == 2


def test_the_host_and_a_missing_device_have_no_stream(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our error message for a missing device is clearer than torch's, so torch must not raise first."""
    streams.own_stream(torch.device("cpu"))()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPU.index)
    streams.own_stream(GPU)()
    assert driver.made == []


class Launches(TorchDispatchMode):
    """Records the stream of every operation that a thread launches."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver
        self.on: list[Stream | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.on.append(self._driver.current())
        return func(*args, **(kwargs or {}))


def test_loading_and_steps_launch_on_the_engines_stream(model_dir: Path, as_on_a_gpu: Driver) -> None:
    with Launches(as_on_a_gpu) as launches, load_engine(model_dir, device_memory_bytes=8 << 20) as engine:
        assert launches.on
        generate(engine, [Job(0, (3, 4, 5), 2)])
    assert set(launches.on) == set(as_on_a_gpu.made)
    assert len(as_on_a_gpu.made) == 1


def test_the_largest_steps_run_on_the_engines_stream_and_later_steps_reuse_their_memory(
    model_dir: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rehearsed(Exception):
        pass

    def beside(*given: object) -> int:
        assert [driver.current()] == driver.made
        raise Rehearsed

    monkeypatch.setattr(load, "beside", beside)
    monkeypatch.setattr(load, "open_cuda", lambda index: HostBackend())  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(Rehearsed):
        load_engine(model_dir, device_memory_bytes=None, device="cuda:1", largest=Largest(tokens=8, sequences=2))


def test_checksums_are_read_after_the_copies_that_load_the_layer(
    model_dir: Path, as_on_a_gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_by: dict[str, Stream | None] = {}
    contents = HostBackend.contents

    def note(backend: Any, tensor: torch.Tensor) -> Iterator[memoryview]:
        read_by[threading.current_thread().name] = as_on_a_gpu.current()
        return contents(backend, tensor)

    monkeypatch.setattr(HostBackend, "contents", note)
    load_engine(model_dir, device_memory_bytes=8 << 20).close()
    [(name, stream)] = read_by.items()
    assert name.startswith("checksums")
    assert [stream] == as_on_a_gpu.made


async def test_the_engine_thread_computes_on_the_engines_stream(
    model_dir: Path, as_on_a_gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = set[tuple[str, Stream | None]]()
    step = ModelRunner.step

    def note(runner: ModelRunner, batch: Batch, tables: Any) -> Any:
        on.add((threading.current_thread().name, as_on_a_gpu.current()))
        return step(runner, batch, tables)

    monkeypatch.setattr(ModelRunner, "step", note)
    async with running_shell(model_dir) as shell:
        stream = await shell.open_stream()
        event = submission(stream, 3)
        await shell.post(event)
        await listen(stream, [event.key.handle])
    assert on == {("engine", made) for made in as_on_a_gpu.made}
    assert on


class Graph:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.captured_on: Stream | None = None
        self.capturing = False

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.captured_on, self.capturing = self._driver.current(), True

    def capture_end(self) -> None:
        self.capturing = False

    def replay(self) -> None:
        """Launches on the current stream."""


def test_steps_are_recorded_on_the_stream_and_a_failed_recording_leaves_it_usable(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Graph] = []

    def graph() -> Graph:
        graphs.append(Graph(driver))
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    streams.own_stream(GPU)()
    record, launched_on = CudaRecord(GPU), list[Stream | None]()
    record(lambda: launched_on.append(driver.current()))
    assert launched_on == 2 * driver.made
    assert [graph.captured_on for graph in graphs] == driver.made

    def refused() -> None:
        if graphs[-1].capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        record(refused)
    assert not any(graph.capturing for graph in graphs)
    assert len(graphs) == 2
