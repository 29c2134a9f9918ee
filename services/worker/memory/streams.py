"""The stream on which an engine computes.

On a GPU it is the engine's own, and the current one of every thread that computes, so that what such a thread hands to
another stream can wait for what it has given the device to do, and for nothing else. It is not the default stream,
which a library may use, or wait for, without saying so.
"""

from collections.abc import Callable
from functools import partial

import torch


def own_stream(device: torch.device) -> Callable[[], None]:
    """Makes one. Every thread that computes calls what is returned, which does nothing on a CPU: from then on its
    launches go there.
    """
    # Which GPU is missing is told where memory is opened.
    if device.type != "cuda" or device.index >= torch.cuda.device_count():
        return _stay
    # torch deals streams out of a pool for each priority, over and over. Whoever copies, or waits for a peer, has one
    # of the ordinary priority: never this one. And what is computed goes first.
    return partial(_go_to, torch.cuda.Stream(device, priority=-1))


def _stay() -> None:
    """On the host there are no streams."""


def _go_to(stream: torch.cuda.Stream) -> None:
    torch.cuda.set_device(stream.device)  # on which Triton launches
    torch.cuda.set_stream(stream)
