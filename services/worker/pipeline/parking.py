"""Parking: the parameters of an idle instance are copied to host memory, and its device memory is released.

Only an instance that serves alone, without requests, transition or migration, is parked. As soon as parking begins, the
instance leads no group, so new requests are refused and placed elsewhere. To wake, it loads all layers and then opens a
group of one, like a member whose group is lost. Used by the engine thread only, except `parks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto

from ballast.common.errors import ConfigError
from ballast.service.logs import get_logger
from services.worker.core.events import RoleChanged
from services.worker.core.report import Parks
from services.worker.memory.device import DeviceMemory
from services.worker.pipeline.context import Background, MemberContext
from services.worker.pipeline.events import ParkOrdered, Woken
from services.worker.pipeline.layers import LayerLoading
from services.worker.pipeline.progress import TransitionProgress

_MEASURED = 5  # number of latest wake-ups, the slowest of which is the estimate
_HOST_BYTES_PER_S = 10e9  # from pageable host memory; assumed until a wake-up has been measured


class _ParkingState(Enum):
    SERVING = auto()
    SAVING = auto()  # layers are being copied to host memory
    PARKED = auto()
    WAKING = auto()


class Parking:
    def __init__(
        self,
        context: MemberContext,
        background: Background,
        layer_loading: LayerLoading,
        why_not: Callable[[], str],
        serve: Callable[[], None],
    ) -> None:
        """`why_not()`: returns what prevents parking; empty: nothing. `serve()`: opens this worker's own group, once
        all layers are loaded.
        """
        self._context = context
        self._memory: DeviceMemory = context.memory
        self._background = background
        self._layer_loading = layer_loading
        self._why_not = why_not
        self._serve = serve
        self._now = context.now
        self._state = _ParkingState.SERVING
        self._jobs: list[Future[None]] = []
        self._stays = False  # True: wakes as soon as it is parked, because layers are still being saved
        self._began_s = 0.0
        self._took_s = deque[float](maxlen=_MEASURED)
        self.parks = Parks(wake_s=self._estimate_s())  # replaced, never changed, because other threads read it

    def _estimate_s(self) -> float:
        """Estimated time to wake (seconds); 0: this instance cannot be parked."""
        parameters = self._memory.parameters
        layer_bytes = self._memory.parameter_bytes_of(range(parameters.layer_count))
        return layer_bytes / _HOST_BYTES_PER_S if self._memory.can_park else 0.0

    @property
    def under_way(self) -> bool:
        """True if this instance is parked, or being parked or woken."""
        return self._state is not _ParkingState.SERVING

    @property
    def at_rest(self) -> bool:
        return self._state in (_ParkingState.SERVING, _ParkingState.PARKED)

    def ordered(self, event: ParkOrdered) -> None:
        """Handle an order of the planner, which repeats it until it has been carried out."""
        match self._state:
            case _ParkingState.SERVING if event.park:
                self._park()
            case _ParkingState.SAVING:
                self._stays = not event.park
            case _ParkingState.PARKED if not event.park:
                self._wake()
            case _:
                pass

    def _park(self) -> None:
        if why := self._why_not() or ("" if self.parks.wake_s else "its parameters cannot be kept in host memory"):
            get_logger().debug("not parked yet", why=why)
            return
        self._state, self._stays, self.parks = _ParkingState.SAVING, False, self.parks._replace(parked=True)
        self._context.answers.tell(RoleChanged(self._now(), leads=False))
        self._layer_loading.server.cancel()
        self._jobs = [self._background.keep(layer) for layer in range(self._context.role.layer_count)]
        for job in self._jobs:
            job.add_done_callback(lambda _: self._context.post(Woken()))

    def poll(self) -> None:
        if self._state is _ParkingState.SAVING and all(job.done() for job in self._jobs):
            self._saved()
        if self._state is _ParkingState.WAKING:
            self._check_missing_layers()

    def _saved(self) -> None:
        if (error := next(filter(None, (job.exception() for job in self._jobs)), None)) is not None:
            self._stay(error)
            return
        if not self._layer_loading.server.idle:
            return
        self._jobs = []
        self._layer_loading.shrink(0)
        self._memory.park()
        self._state = _ParkingState.PARKED
        get_logger().info("parked", given_back_bytes=self._memory.report().free_bytes)
        if self._stays:
            self._wake()

    def _stay(self, error: BaseException) -> None:
        """Continue to serve, because the layers cannot be copied to host memory, and report that this instance cannot
        be parked.
        """
        get_logger().warning("not parked: its parameters cannot be kept in host memory", why=str(error))
        self._jobs, self._state, self.parks = [], _ParkingState.SERVING, Parks()
        self._context.answers.tell(RoleChanged(self._now(), leads=True))  # its memory has not changed

    def _wake(self) -> None:
        self._began_s, role = self._now(), self._context.role
        try:
            self._memory.unpark()
        except ConfigError as error:  # another process uses the memory; retried with the next order
            get_logger().warning("not woken: the device's memory is not available", why=str(error))
            return
        self._state = _ParkingState.WAKING
        epoch = max(role.epoch, self._context.published.newest_epoch)
        progress = TransitionProgress(epoch=epoch, began_s=self._began_s, block_count_before=0)
        self._layer_loading.load(epoch, {}, progress, 0)

    def _check_missing_layers(self) -> None:
        if not self._layer_loading.all_here():
            return
        self._layer_loading.end()
        self._serve()
        self._took_s.append(self._now() - self._began_s)
        self._state, self.parks = _ParkingState.SERVING, Parks(wake_s=max(self._took_s))
        get_logger().info("woken", seconds=round(self._took_s[-1], 3))
