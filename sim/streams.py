"""Output streams from a worker to dispatchers."""

from typing import NamedTuple, Protocol

from ballast.common.load import LoadReport
from services.worker.core.events import Emit
from sim.fast_forward import Share


class SimOutput(NamedTuple):
    """Output of a turn for one dispatcher."""

    emit: Emit | None
    load: LoadReport
    seen_handle: int


class Listener(Protocol):
    """Interface of a dispatcher's end of a stream."""

    def hear(self, output: SimOutput) -> None: ...

    def hear_step(self, share: Share, step: int, used_block_count: int) -> None:
        """Receive step number `step` of a fast-forward, after which `used_block_count` blocks are in use."""
        ...

    def lost(self, why: str) -> None:
        """Handle the loss of the worker's end of the stream."""
        ...


class SimStream:
    """The worker's end of a stream."""

    __slots__ = ("listener", "open", "seen_handle", "sent_at_s", "told", "told_handle")

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.open = True
        self.sent_at_s = 0.0
        self.seen_handle = self.told_handle = 0
        self.told: LoadReport | None = None

    def tell(self, emit: Emit | None, report: LoadReport, now_s: float) -> None:
        self.told, self.told_handle, self.sent_at_s = report, self.seen_handle, now_s
        self.listener.hear(SimOutput(emit, report, self.seen_handle))
