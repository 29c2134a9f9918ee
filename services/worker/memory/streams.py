"""The stream on which an engine computes.

On a GPU it is a dedicated stream, made current on every thread that computes, so that other streams can wait for
exactly the work that this thread has launched. The default stream is avoided, because libraries use it or synchronise
with it.
"""

from collections.abc import Callable
from functools import partial

import torch


def own_stream(device: torch.device) -> Callable[[], None]:
    """Create the engine's stream. Every computing thread calls the result once, so that its launches use that stream.
    No effect on a CPU.
    """
    # A missing GPU is reported when memory is opened.
    if device.type != "cuda" or device.index >= torch.cuda.device_count():
        return _stay
    # torch reuses streams from one pool per priority. Copies and waits for peers use ordinary priority, so they never
    # share this stream, and computation has precedence.
    return partial(_go_to, torch.cuda.Stream(device, priority=-1))


def _stay() -> None:
    """Does nothing, because the host has no streams."""


def _go_to(stream: torch.cuda.Stream) -> None:
    torch.cuda.set_device(stream.device)  # Triton launches on it
    torch.cuda.set_stream(stream)
