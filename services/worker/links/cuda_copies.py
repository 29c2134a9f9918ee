"""Copies on a GPU's side streams: see `copies`.

The engine's stream is whatever is current where something is handed over (see `memory.streams`). Each thread that
copies has a stream of its own here, so that a copy waits for the kernels it needs and for no others. One thread waits
for all fetches of a worker; it sleeps in the driver, without the interpreter, until the event has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from ballast.service.logs import get_logger
from services.worker.links.copies import HOST, Copies, HostCopies


class CudaMark:
    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopies:
    """Of a worker on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_thread = threading.local()
        self._fetched = SimpleQueue[tuple[CudaMark, torch.Tensor, Callable[[torch.Tensor | None], None]] | None]()
        self._starting = threading.Lock()
        self._teller: threading.Thread | None = None

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device, pin_memory=device == HOST)

    def mark(self) -> CudaMark:
        return CudaMark(self._device)

    @contextmanager
    def copying(self) -> Generator[None]:
        with torch.cuda.stream(self._stream()):
            try:
                yield
            finally:
                self.mark().wait()  # a copy that failed half way may still write

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
            except RuntimeError as error:  # the device's, which every later call has too
                get_logger().error("what was to be sent could not be computed or copied", why=str(error))
                then(None)
            else:
                then(there)
            del fetched, mark, there, then  # not kept while it waits for the next


def copies_for(device: torch.device) -> Copies:
    return CudaCopies(device) if device.type == "cuda" else HostCopies()
