"""Executes the core's commands: streams to workers and clients, one timer."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from ballast.common.clock import Clock
from ballast.common.errors import BallastError, InvariantViolation, broken_core
from ballast.common.ids import RequestId
from ballast.common.model import ModelInfo
from ballast.rpc.channel import Dial, open_channel
from ballast.service.logs import get_logger
from ballast.service.tasks import Work, note_failure, run_supervised
from services.dispatcher.core import events as d
from services.dispatcher.core.dispatcher import DispatcherCore
from services.dispatcher.policy.freeness import WorkerKey
from services.dispatcher.shell.chronicle import Chronicle
from services.dispatcher.shell.clients import ClientEnding, ClientStream, Pacer
from services.dispatcher.shell.links import Identity, WorkerLink
from services.dispatcher.shell.metrics import DispatcherMetrics

_SWEEP_S = 1.0
_MIN_TIMER_S = 0.001
_STORY_EVENTS: Final = 64


class DispatcherShell:
    """Executes the core's commands on one event loop. Links to workers are open only while `run` runs."""

    def __init__(
        self,
        core: DispatcherCore,
        *,
        identity: Identity,
        clock: Clock,
        metrics: DispatcherMetrics,
        chronicle: Chronicle,
        on_bug: Callable[[InvariantViolation], None],
        client_stall_timeout_s: float,
        dial: Dial = open_channel,
    ) -> None:
        self._dial = dial
        self.core = core
        self.chronicle = chronicle
        self.ready_changed = asyncio.Event()
        self._identity = identity
        self._clock = clock
        self._metrics = metrics
        self._on_bug = on_bug
        self._client_stall_timeout_s = client_stall_timeout_s
        self._clients: dict[RequestId, ClientStream] = {}
        self._links: dict[WorkerKey, tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._tasks = Work()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf
        self._idle = asyncio.Event()
        self._pacer = Pacer()
        self._story: deque[d.Event] = deque(maxlen=_STORY_EVENTS)
        self._execute: Mapping[type[d.Command], Callable[..., None]] = {
            d.Deliver: self._deliver,
            d.Finish: self._end,
            d.Fail: self._end,
            d.Refuse: self._end,
            d.PlaceOnWorker: self._place,
            d.AbortOnWorker: self._abort,
            d.Connect: self._connect,
            d.Disconnect: self._disconnect,
        }

    @property
    def model(self) -> ModelInfo | None:
        """The served model; None until the first worker has connected."""
        return self.core.fleet.model

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of prompt and answer, limited by model and cluster; None: unknown."""
        model, reach = self.model, self.core.long.reach
        if model is None or reach is None:
            return None if model is None else model.max_model_len
        return min(model.max_model_len, reach.group_tokens)

    @property
    def ready(self) -> bool:
        return not self.core.draining and any(worker.connected for worker in self.core.fleet)

    async def run(self) -> None:
        """Run until cancelled."""
        async with self._tasks:
            writing = self._tasks.keep(self.chronicle.write_lines, "log of requests")
            try:
                await run_supervised(self._sweep, "stalled clients")
            finally:
                writing.cancel()
                for _, task in self._links.values():
                    task.cancel()
                if self._timer is not None:
                    self._timer.cancel()

    def feed(self, event: d.Event) -> None:
        """Handle an event. Synchronous, so that no other code runs between a decision and its commands."""
        self._story.append(event)
        try:
            commands = self.core.handle(event)
        except InvariantViolation as bug:
            self._report(bug)
            return
        except Exception as error:  # noqa: BLE001 after any error the core's state cannot be trusted
            self._report(broken_core(error))
            return
        for command in commands:
            try:
                self._execute[type(command)](command)
            except InvariantViolation as bug:
                self._report(bug)
            except Exception as error:  # noqa: BLE001 of a library; the remaining commands are executed
                note_failure(f"to {type(command).__name__}", error)
        self._arm_timer()
        if not self.core.requests:
            self._idle.set()

    def _report(self, bug: InvariantViolation) -> None:
        self._on_bug(InvariantViolation(bug.why, [*bug.story, *(repr(e)[:500] for e in self._story)]))

    # --------------------------------------------------------------------------------------------- clients

    def open(self, request: d.Request) -> ClientStream:
        """Submit a request; a refusal becomes the stream's ending."""
        stream = ClientStream(request.request_id, self._pacer)
        twin = self._clients.get(request.request_id)
        self._clients[request.request_id] = stream
        self._idle.clear()
        at_s = self._clock.now_s()
        self.feed(d.RequestSubmitted(at_s, request))
        if isinstance(stream.ending, d.Refuse):  # perhaps because another request has its id
            self.record_refused(request.request_id, stream.ending.error, request)
        else:
            self.chronicle.opened(request.request_id, at_s)
        if twin is not None and twin.ending is None:
            self._clients[request.request_id] = twin  # the new request was refused
        return stream

    def close(self, stream: ClientStream, why: str) -> None:
        """Close the stream of a client's call that has ended, and cancel its request if that still runs."""
        stream.close()
        if self._clients.get(stream.request_id) is stream:
            del self._clients[stream.request_id]
            if stream.ending is None:
                self.withdraw(stream.request_id, why)

    def withdraw(self, request_id: RequestId, why: str) -> bool:
        """Cancel a request. Returns False if it is unknown."""
        found = request_id in self.core.requests
        self.feed(d.Withdrawn(self._clock.now_s(), request_id, why))
        return found

    def record_refused(self, request_id: RequestId, error: BallastError, request: d.Request | None) -> None:
        """Record a request that is not accepted. `request`: None if it was invalid."""
        if request is None:
            self._metrics.invalid_count += 1
        self.chronicle.record_refused(request_id, error, request, self._clock.now_s())

    def drain(self, *, for_good: bool = False) -> None:
        """Refuse new requests. `for_good`: the process is about to exit, so `undrain` has no effect."""
        self.feed(d.DispatcherDrainRequested(self._clock.now_s(), for_good))
        self.ready_changed.set()

    def undrain(self) -> bool:
        """Cancel a drain. Returns True if requests are accepted again."""
        self.feed(d.UndrainRequested(self._clock.now_s()))
        self.ready_changed.set()
        return not self.core.draining

    async def drained(self, timeout_s: float) -> None:
        """Wait until no request is left. Requests that still run after `timeout_s` are aborted."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.core.requests:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            get_logger().warning("giving up requests", count=len(self.core.requests), waited_s=timeout_s)
            self.feed(d.TimeIsUp(self._clock.now_s()))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._cancel_stalled_clients()

    def _cancel_stalled_clients(self) -> None:
        latest_s = self._clock.now_s() - self._client_stall_timeout_s
        for stream in list(self._clients.values()):
            if stream.waiting_since_s is not None and stream.waiting_since_s < latest_s:
                get_logger().warning("client does not read", request_id=stream.request_id)
                why = f"the client read nothing for {self._client_stall_timeout_s:g} s"
                self.close(stream, why)
                stream.give_up(why)

    # --------------------------------------------------------------------------------------------- commands

    def _deliver(self, command: d.Deliver) -> None:
        stream = self._clients.get(command.request_id)
        if stream is not None:
            stream.push(command.token_ids, command.text, command.logprobs, self._story[-1].at_s)

    def _end(self, command: ClientEnding) -> None:
        stream = self._clients.get(command.request_id)
        if stream is not None:
            stream.end(command, self._story[-1].at_s)
        if not isinstance(command, d.Refuse):
            self._metrics.observe(command.facts)
            self.chronicle.ended(command, self._story[-1].at_s)

    def _place(self, command: d.PlaceOnWorker) -> None:
        self._links[command.worker][0].place(command)

    def _abort(self, command: d.AbortOnWorker) -> None:
        link = self._links.get(command.worker)
        if link is not None:
            link[0].abort(command.handle)

    def _connect(self, command: d.Connect) -> None:
        link = WorkerLink(
            command.worker,
            command.address,
            identity=self._identity,
            clock=self._clock,
            feed=self._feed_from_link,
            dial=self._dial,
        )
        task = self._tasks.keep(link.run, "link to a worker")
        self._links[command.worker] = (link, task)

    def _disconnect(self, command: d.Disconnect) -> None:
        _, task = self._links.pop(command.worker)
        task.cancel()
        self.ready_changed.set()

    def _feed_from_link(self, event: d.Event) -> None:
        self.feed(event)
        if not isinstance(event, d.StepReceived):
            self.ready_changed.set()

    # --------------------------------------------------------------------------------------------- timer

    def _arm_timer(self) -> None:
        at_s = self.core.next_timer_s()
        if at_s >= self._timer_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(_MIN_TIMER_S, at_s - self._clock.now_s())
        self._timer_at_s = at_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at_s = None, math.inf
        self.feed(d.DispatcherTick(self._clock.now_s()))
