"""Copies on side streams of a GPU; see `copies`.

Many pieces are gathered by one kernel and cross the bus in one copy, and vice versa.

The engine's stream is the calling thread's current one (see `memory.streams`). Each copying thread has its own stream,
so a copy waits only for the kernels that it needs. One thread waits for all fetches of a worker: it sleeps in the
driver, without the GIL, until their events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from ballast.service.logs import get_logger
from services.worker.links.copies import HOST, Copies, HostCopies
from services.worker.links.pieces import Pieces
from services.worker.memory.backend import SLOT_BYTES
from services.worker.memory.runs import Gatherer, RunKernel

_LARGE_BYTES = 1 << 20
_WARM_SLOTS = 8
_WIDE_BYTES = 16


class CudaMark:
    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopies:
    """`Copies` of a worker whose tensors are on a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError if triton is not installed."""
        self._device = device
        self._kernel: Gatherer = RunKernel(device)
        self._of_thread = threading.local()
        self._fetched = SimpleQueue[tuple[CudaMark, torch.Tensor, Callable[[torch.Tensor | None], None]] | None]()
        self._starting = threading.Lock()
        self._teller: threading.Thread | None = None

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Return a flat byte buffer. Large buffers are cut from whole slots, which torch reuses, because pinning stalls
        the GPU.
        """
        whole_bytes = size_bytes if size_bytes < _LARGE_BYTES else -(-size_bytes // SLOT_BYTES) * SLOT_BYTES
        whole = torch.empty(whole_bytes, dtype=torch.uint8, device=device, pin_memory=device == HOST)
        return whole[:size_bytes]

    def warm(self) -> None:
        with ThreadPoolExecutor(1) as thread:  # its stream and memory are released with it
            thread.submit(self._warm).result()

    def _warm(self) -> None:
        slots = [self.empty(SLOT_BYTES, HOST) for _ in range(_WARM_SLOTS)]
        memory = torch.zeros(2 * _WIDE_BYTES, dtype=torch.uint8, device=self._device)
        for first in (0, 1):  # aligned and unaligned
            pieces = Pieces([memory[first : first + _WIDE_BYTES]], "memory")
            self.gather(pieces, 0, slots[0][:_WIDE_BYTES])
            self.scatter(pieces, 0, slots[0][:_WIDE_BYTES])

    def mark(self) -> CudaMark:
        return CudaMark(self._device)

    @contextmanager
    def copying(self) -> Generator[None]:
        with torch.cuda.stream(self._stream()):
            try:
                yield
            finally:
                self.mark().wait()  # a copy that failed may still be writing

    def gather(self, pieces: Pieces, offset: int, slot: torch.Tensor) -> None:
        with self.copying():
            for at, part, staged in self._parts(slot):
                runs = pieces.lies(offset + at, part.numel())
                self._kernel.gather(runs, part if staged is None else staged)
                if staged is not None:
                    part.copy_(staged, non_blocking=True)

    def scatter(self, pieces: Pieces, offset: int, slot: torch.Tensor) -> None:
        with self.copying():
            for at, part, staged in self._parts(slot):
                if staged is not None:
                    staged.copy_(part, non_blocking=True)
                self._kernel.scatter(pieces.lies(offset + at, part.numel()), part if staged is None else staged)

    def _parts(self, slot: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """Yield a device slot as a whole, or a host slot in parts, each with a staging buffer on the device. All parts
        may share the buffer, because one stream copies them in order.
        """
        if slot.device != HOST:
            yield 0, slot, None
            return
        if not hasattr(self._of_thread, "staged"):
            self._of_thread.staged = torch.empty(SLOT_BYTES, dtype=torch.uint8, device=self._device)
        at = 0
        for part in slot.split(SLOT_BYTES):
            yield at, part, self._of_thread.staged[: part.numel()]
            at += part.numel()

    def fetch(self, payload: torch.Tensor, device: torch.device, then: Callable[[torch.Tensor | None], None]) -> None:
        computed, there = self.mark(), payload
        if payload.device != device:
            there = self.empty(payload.numel(), device)
            with torch.cuda.stream(self._stream()):
                computed.event.wait(self._stream())
                there.copy_(payload, non_blocking=True)
                computed = self.mark()
        with self._starting:
            if self._teller is None:
                self._teller = threading.Thread(target=self._tell, name=f"links-fetch-{self._device}", daemon=True)
                self._teller.start()
        self._fetched.put((computed, there, then))

    def close(self) -> None:
        with self._starting:
            teller, self._teller = self._teller, None
        if teller is not None:
            self._fetched.put(None)
            teller.join()

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(self._device)
        return self._of_thread.stream

    def _tell(self) -> None:
        while (fetched := self._fetched.get()) is not None:
            mark, there, then = fetched
            try:
                mark.wait()
            except RuntimeError as error:  # a device error, which every later call raises again
                get_logger().error("the data to send could not be computed or copied", why=str(error))
                then(None)
            else:
                then(there)
            del fetched, mark, there, then  # release them before waiting for the next fetch


def copies_for(device: torch.device) -> Copies:
    return CudaCopies(device) if device.type == "cuda" else HostCopies()
