"""The stream on which an engine computes.

On a GPU it is the engine's own, and the current one of every computing thread, so that work given to another stream
waits exactly for what that thread has launched. The default stream is avoided, as libraries use it or wait for it.
"""

from collections.abc import Callable
from functools import partial

import torch


def own_stream(device: torch.device) -> Callable[[], None]:
    """Create one. Every computing thread calls the result once: its launches then go to that stream. Does nothing on a
    CPU.
    """
    # A missing GPU is reported when memory is opened.
    if device.type != "cuda" or device.index >= torch.cuda.device_count():
        return _stay
    # torch reuses streams of a pool for each priority. Copies and waits for peers use ordinary priority, so they never
    # share this one, and computation goes first.
    return partial(_go_to, torch.cuda.Stream(device, priority=-1))


def _stay() -> None:
    """There are no streams on the host."""


def _go_to(stream: torch.cuda.Stream) -> None:
    torch.cuda.set_device(stream.device)  # Triton launches on it
    torch.cuda.set_stream(stream)
