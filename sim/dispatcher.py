"""A dispatcher in virtual time, with the streams to its workers and the clients behind it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ballast.common.errors import InvariantViolation
from ballast.common.ids import DispatcherId, WorkerId
from ballast.common.layout import Layout
from ballast.common.model import ModelInfo
from services.dispatcher.core import events as d
from services.dispatcher.core.dispatcher import DispatcherCore, Limits
from services.dispatcher.core.placement import PlacementRules
from services.dispatcher.policy.freeness import RoutingRules, WorkerKey
from services.worker.core.events import Aborted, SequenceKey, Submitted
from sim.clock import Clock
from sim.control import Delays
from sim.instance import Instance, Output


@dataclass(frozen=True, slots=True)
class DispatcherRules:
    limits: Limits
    placement: PlacementRules
    routing: RoutingRules


Deliver = Callable[[d.Deliver, float], None]
End = Callable[[d.Finish | d.Fail | d.Refuse, float], None]


class _Link:
    """A stream to one life of one worker."""

    __slots__ = ("_node", "instance", "key", "open", "stream_id")

    def __init__(self, node: "DispatcherNode", key: WorkerKey, instance: Instance) -> None:
        self._node = node
        self.key = key
        self.instance = instance
        self.stream_id = 0
        self.open = True

    def hear(self, output: Output) -> None:
        self._node.told(self, output)

    def lost(self, why: str) -> None:
        self._node.told_lost(self, why)


class DispatcherNode:
    def __init__(
        self,
        dispatcher_id: DispatcherId,
        rules: DispatcherRules,
        instances: Mapping[WorkerId, Instance],
        *,
        clock: Clock,
        delays: Delays,
        model: ModelInfo,
        max_waiting_count: int,
        deliver: Deliver,
        end: End,
    ) -> None:
        """`deliver` and `end` are the client's: new tokens of a request, and how it has ended."""
        self.core = DispatcherCore(dispatcher_id, rules.limits, rules.placement, rules.routing)
        self._instances = instances
        self._clock = clock
        self._delays = delays
        self._model = model
        self._max_waiting_count = max_waiting_count
        self._deliver = deliver
        self._end = end
        self._links: dict[WorkerKey, _Link] = {}
        self._timer_at_s = math.inf
        self.touched = True  # the core was told something since somebody set it back, other than
        self.stepped: dict[WorkerKey, None] = {}  # steps of these workers that only delivered tokens
        self._labels = {what: f"{dispatcher_id} {what}".encode() for what in ("timer", "link", "place", "hears")}

    def submit(self, request: d.Request) -> None:
        self.feed(d.Submitted(self._clock.now_s, request))

    def adopt(self, layout: Layout) -> None:
        self.feed(d.LayoutChanged(self._clock.now_s, layout))

    def backlog(self) -> tuple[int, int]:
        return len(self.core.backlog), self.core.backlog.token_count

    # ------------------------------------------------------------ events and commands

    def feed(self, event: d.Event) -> None:
        now_s, deliver, token = self._clock.now_s, self._deliver, d.Deliver
        more = False
        for command in self.core.handle(event):
            if type(command) is token:
                deliver(command, now_s)
            else:
                more = True
                self._execute(command, now_s)
        if isinstance(event, d.StepReceived) and not more:
            self.stepped[event.worker] = None
        else:
            self.touched = True
        due_at_s = self.core.next_timer_s()
        if due_at_s < self._timer_at_s:
            self._timer_at_s = max(due_at_s, now_s)
            self._clock.at(self._timer_at_s, self._labels["timer"], partial(self._tick, self._timer_at_s))

    def _tick(self, at_s: float) -> None:
        if at_s == self._timer_at_s:
            self._timer_at_s = math.inf
            self.feed(d.Tick(at_s))

    def _execute(self, command: d.Command, now_s: float) -> None:
        match command:
            case d.Place():
                self._place(command)
            case d.Finish() | d.Fail() | d.Refuse():
                self._end(command, now_s)
            case d.Connect(worker=key):
                link = self._links[key] = _Link(self, key, self._instances[key.worker_id])
                self._clock.after(self._delays.rpc_s, self._labels["link"], partial(self._connect, link))
            case d.Disconnect(worker=key):
                link = self._links.pop(key)
                link.open = False
                close = partial(link.instance.close_stream, link.stream_id)
                self._clock.after(self._delays.rpc_s, self._labels["link"], close)
            case d.AbortOnWorker(worker=key, handle=handle):
                self._abort(key, handle)
            case d.Deliver():
                self._deliver(command, now_s)

    # ------------------------------------------------------------ streams

    def _connect(self, link: _Link) -> None:
        if not link.open or link.instance.crashed:
            return
        link.stream_id = link.instance.open_stream(link)
        load = link.instance.load()

        def connected() -> None:
            if link.open:
                event = d.WorkerConnected(self._clock.now_s, link.key, self._model, load, self._max_waiting_count)
                self.feed(event)

        self._clock.after(self._delays.rpc_s, self._labels["link"], connected)

    def _place(self, command: d.Place) -> None:
        link = self._links.get(command.worker)
        if link is None:
            raise InvariantViolation(f"{command.request.request_id} is placed on {command.worker} without a stream")
        self._clock.after(self._delays.rpc_s, self._labels["place"], partial(self._submit, link, command))

    def _submit(self, link: _Link, command: d.Place) -> None:
        if not link.open:
            return
        request, now_s = command.request, self._clock.now_s
        link.instance.post(
            Submitted(
                at_s=now_s,
                key=SequenceKey(link.stream_id, command.handle),
                request_id=request.request_id,
                attempt=command.attempt,
                prompt_token_ids=tuple(request.prompt_token_ids),
                sampling=request.sampling,
                output_token_ids=tuple(command.output_token_ids),
                priority=request.priority,
                deadline_at_s=now_s + command.deadline_s,
                wants_text=False,
                expects_handover=command.expects_handover,
            )
        )

    def _abort(self, key: WorkerKey, handle: int) -> None:
        link = self._links.get(key)
        if link is None:
            return

        def arrive() -> None:
            if link.open:
                link.instance.post(Aborted(self._clock.now_s, SequenceKey(link.stream_id, handle)))

        self._clock.after(self._delays.rpc_s, self._labels["place"], arrive)

    def told(self, link: _Link, output: Output) -> None:
        """By the worker's side, when its turn has ended."""
        self._clock.after(self._delays.rpc_s, self._labels["hears"], partial(self._hear, link, output))

    def told_lost(self, link: _Link, why: str) -> None:
        def arrive() -> None:
            if link.open:
                link.open = False
                self.feed(d.WorkerLost(self._clock.now_s, link.key, why))

        self._clock.after(self._delays.rpc_s, self._labels["link"], arrive)

    def _hear(self, link: _Link, output: Output) -> None:
        if not link.open:
            return
        emit, now_s = output.emit, self._clock.now_s
        if emit is None:
            self.feed(d.StepReceived(now_s, link.key, (), (), (), (), (), (), output.load, output.seen_handle))
            return
        endings = [
            d.Ending(e.handle, e.finish_reason, e.matched_stop, e.error, e.refused, e.invalid, e.moved_to)
            for e in emit.endings
        ]
        self.feed(
            d.StepReceived(
                now_s,
                link.key,
                emit.handles,
                emit.token_counts,
                emit.token_ids,
                emit.texts,
                emit.logprobs,
                endings,
                output.load,
                output.seen_handle,
            )
        )
