"""A dispatcher in virtual time, with its streams to workers and clients."""

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from ballast.common.errors import InvariantViolation
from ballast.common.ids import DispatcherId, WorkerId
from ballast.common.layout import Layout
from ballast.common.model import ModelInfo
from ballast.common.reach import Reach
from ballast.common.sampling import FinishReason
from ballast.common.traffic import Traffic
from services.dispatcher.core import events as d
from services.dispatcher.core.dispatcher import DispatcherCore
from services.dispatcher.core.limits import Limits
from services.dispatcher.core.placement import PlacementRules
from services.dispatcher.policy.freeness import RoutingRules, WorkerKey
from services.worker.core.events import Aborted, SequenceKey, Submitted
from sim.clients import Clients
from sim.fast_forward import Share
from sim.instance import SimInstance
from sim.state import Site
from sim.streams import SimOutput

_AGAIN_S = 0.05  # delay until an ended stream is reopened
_PLAIN_ENDINGS = (FinishReason.STOP, FinishReason.LENGTH)  # endings after which the request is not placed again


@dataclass(frozen=True, slots=True)
class DispatcherRules:
    limits: Limits
    placement: PlacementRules
    routing: RoutingRules


class _SimWorkerLink:
    """A stream to one incarnation of a worker."""

    __slots__ = (
        "_node",
        "first",
        "instance",
        "instants_s",
        "key",
        "last",
        "open",
        "reported",
        "share",
        "stream_id",
        "used",
        "waits",
    )

    def __init__(self, node: "DispatcherNode", key: WorkerKey, instance: SimInstance) -> None:
        self._node = node
        self.key = key
        self.instance = instance
        self.stream_id = 0
        self.open = True
        # A fast-forward's steps not passed to the core yet:
        self.share: Share | None = None
        self.waits = False  # a request waits on the worker throughout the fast-forward
        self.first = self.last = 0  # numbers of the first and last step
        self.used = 0  # blocks in use after the last step
        self.reported = True  # the core knows the load after the last step
        self.instants_s: array[float] = array("d")  # arrival of each step

    def hear_step(self, share: Share, step: int, used_block_count: int) -> None:
        self._node.told_step(self, share, step, used_block_count)

    def hear(self, output: SimOutput) -> None:
        self._node.told(self, output)

    def lost(self, why: str) -> None:
        self._node.told_lost(self, why)


class DispatcherNode:
    def __init__(
        self,
        dispatcher_id: DispatcherId,
        rules: DispatcherRules,
        instances: Mapping[WorkerId, SimInstance],
        site: Site,
        clients: Clients,
        *,
        model: ModelInfo,
        max_waiting_count: int,
    ) -> None:
        self.core = DispatcherCore(dispatcher_id, rules.limits, rules.placement, rules.routing)
        self._instances = instances
        self._clock = site.clock
        self._delays = site.delays
        self.name = str(dispatcher_id)
        self._lines = site.lines
        self._model = model
        self._max_waiting_count = max_waiting_count
        self._deliver = clients.deliver
        self._deliver_steps = clients.deliver_steps
        self._behind: dict[_SimWorkerLink, None] = {}  # links with tokens of fast-forwards not passed to the core
        self._unreported: dict[_SimWorkerLink, None] = {}  # links of `_behind` with a load not passed to the core
        self._unheard: dict[_SimWorkerLink, None] = {}  # links of `_behind` without any step passed to the core
        self._end = clients.end
        self._as_sampled = clients.as_sampled
        self._links: dict[WorkerKey, _SimWorkerLink] = {}
        self._timer_at_s = math.inf
        self.touched = True  # the core has handled an event since this was reset, except for token-only steps
        self.stepped: dict[WorkerKey, None] = {}  # workers with token-only steps since this was reset
        self._labels = {what: f"{dispatcher_id} {what}".encode() for what in ("timer", "link", "place", "hears")}

    def submit(self, request: d.Request) -> None:
        self.feed(d.RequestSubmitted(self._clock.now_s, request))

    def adopt(self, layout: Layout) -> None:
        self.feed(d.LayoutChanged(self._clock.now_s, layout))

    def set_reach(self, reach: Reach) -> None:
        self.feed(d.ReachChanged(self._clock.now_s, reach))

    def traffic(self) -> Traffic | None:
        """The traffic to publish; None if it has not changed."""
        if not self.core.carries_changes(self._clock.now_s):
            return None
        self.catch_up()
        return self.core.traffic(self._clock.now_s)

    # ------------------------------------------------------------ events and commands

    def feed(self, event: d.Event) -> None:
        if self._behind:
            self._catch_up_for(event)
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
        self._set_timer()

    def _set_timer(self) -> None:
        due_at_s = self.core.next_timer_s()
        if due_at_s < self._timer_at_s:
            self._timer_at_s = max(due_at_s, self._clock.now_s)
            self._clock.at(self._timer_at_s, self._labels["timer"], partial(self._tick, self._timer_at_s))

    def _catch_up_for(self, event: d.Event) -> None:
        """Bring the core up to date before it handles an event: with loads if the event may place a request, and with
        tokens if it may change placed requests.
        """
        match event:
            case d.RequestSubmitted(request=request):
                self._report_loads_for(request)
            case d.StepReceived(worker=key, endings=endings, load=load):
                link = self._links[key]
                if link in self._behind:
                    self._catch_up_with(link)
                if endings and self.core.growth.is_due(self._clock.now_s):
                    self.catch_up()
                moves = any(e.finish_reason not in _PLAIN_ENDINGS or e.refused or e.moved_to for e in endings)
                if moves or load.waiting_count or self.core.waits:
                    self._report_loads()
            case _:
                self.catch_up()

    def catch_up(self) -> None:
        """Pass all pending steps of fast-forwards to the core."""
        for link in list(self._behind):
            self._catch_up_with(link)

    def _report_loads_for(self, request: d.Request) -> None:
        """Pass the loads on which the request's placement depends. Free memory only shrinks during a fast-forward, so a
        worker that is not the freest of its shape now will not become so.
        """
        if not self.core.waits:
            for link in list(self._unheard):
                self._report_load(link)
            while found := self.core.contenders(request, self._clock.now_s):
                behind = [link for key in found if not (link := self._links[key]).reported]
                if not behind:
                    return
                for link in behind:
                    self._report_load(link)
        self._report_loads()

    def _report_loads(self) -> None:
        for link in list(self._unreported):
            self._report_load(link)

    def _report_load(self, link: _SimWorkerLink) -> None:
        self._is_known(link)
        share = link.share
        assert share is not None, "it is behind"
        now_s = self._clock.now_s
        load = share.pace.report(link.last, link.used, now_s)
        self.core.handle(d.StepReceived(now_s, link.key, (), (), (), (), (), (), load, share.seen_handle))
        self.stepped[link.key] = None

    def _is_known(self, link: _SimWorkerLink) -> None:
        """Record that the core knows a worker's load, or is about to receive it."""
        if not link.reported:
            link.reported = True
            del self._unreported[link]
            self._unheard.pop(link, None)

    def _catch_up_with(self, link: _SimWorkerLink) -> None:
        """Pass a link's pending steps, with all their tokens, to the core in one message."""
        share, instants_s = link.share, link.instants_s
        assert share is not None, "it is behind"
        link.share, link.instants_s = None, array("d")
        del self._behind[link]
        self._is_known(link)
        now_s, count = self._clock.now_s, len(instants_s)
        token_ids = share.token_ids(link.first, count)
        load = share.pace.report(link.last, link.used, now_s)
        counts = [count] * len(share.handles)
        commands = self.core.handle(
            d.StepReceived(now_s, link.key, share.handles, counts, token_ids, (), (), (), load, share.seen_handle)
        )
        others = [c for c in commands if not isinstance(c, d.Deliver)]
        delivered = [c for c in commands if isinstance(c, d.Deliver)] if others else cast(list[d.Deliver], commands)
        self._deliver_steps(delivered, instants_s)
        for command in others:
            self.touched = True
            self._execute(command, now_s)
        self.stepped[link.key] = None

    def _tick(self, at_s: float) -> None:
        if at_s == self._timer_at_s:
            self._timer_at_s = math.inf
            self.feed(d.DispatcherTick(at_s))

    def _execute(self, command: d.Command, now_s: float) -> None:
        match command:
            case d.PlaceOnWorker():
                self._place(command)
            case d.Finish() | d.Fail() | d.Refuse():
                self._end(command, now_s)
            case d.Connect(worker=key):
                link = self._links[key] = _SimWorkerLink(self, key, self._instances[key.worker_id])
                self._reach(link, self._labels["link"], partial(self._connect, link))
            case d.Disconnect(worker=key):
                link = self._links.pop(key)
                link.open = False
                self._reach(link, self._labels["link"], partial(self._close, link))
            case d.AbortOnWorker(worker=key, handle=handle):
                self._abort(key, handle)
            case d.Deliver():
                self._deliver(command, now_s)

    # ------------------------------------------------------------ streams

    def _reach(self, link: _SimWorkerLink, delay_label: bytes, act: Callable[[], None]) -> None:
        """Call a function at the worker, after the delay."""

        def arrive() -> None:
            self._lines.bring(self.name, link.key.worker_id, act)

        self._clock.after(self._delays.rpc_s, delay_label, arrive)

    def _be_reached(self, link: _SimWorkerLink, delay_label: bytes, act: Callable[[], None]) -> None:
        """Call a function here, after the delay."""

        def arrive() -> None:
            self._lines.bring(link.key.worker_id, self.name, act)

        self._clock.after(self._delays.rpc_s, delay_label, arrive)

    @staticmethod
    def _close(link: _SimWorkerLink) -> None:
        link.instance.close_stream(link.stream_id)

    def _connect(self, link: _SimWorkerLink) -> None:
        if not link.open or link.instance.crashed or link.instance.incarnation != link.key.incarnation:
            return
        link.stream_id = link.instance.open_stream(link)
        load = link.instance.load()

        def connected() -> None:
            if link.open:
                event = d.WorkerConnected(self._clock.now_s, link.key, self._model, load, self._max_waiting_count)
                self.feed(event)

        self._be_reached(link, self._labels["link"], connected)

    def _place(self, command: d.PlaceOnWorker) -> None:
        link = self._links.get(command.worker)
        if link is None:
            raise InvariantViolation(f"{command.request.request_id} is placed on {command.worker} without a stream")
        self._reach(link, self._labels["place"], partial(self._submit, link, command))

    def _submit(self, link: _SimWorkerLink, command: d.PlaceOnWorker) -> None:
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
                sampling=self._as_sampled(request),
                output_token_ids=tuple(command.output_token_ids),
                priority=request.priority,
                deadline_at_s=now_s + command.deadline_s,
                wants_text=False,
                expects_handover=command.expects_handover,
                cache_salt=request.cache_salt,
                targets=request.targets,
                caller=request.caller_number,
            )
        )

    def _abort(self, key: WorkerKey, handle: int) -> None:
        link = self._links.get(key)
        if link is None:
            return

        def arrive() -> None:
            if link.open:
                link.instance.post(Aborted(self._clock.now_s, SequenceKey(link.stream_id, handle)))

        self._reach(link, self._labels["place"], arrive)

    def told(self, link: _SimWorkerLink, output: SimOutput) -> None:
        """Send a worker's output to the dispatcher; called by the worker at the end of its turn."""
        self._clock.after(self._delays.rpc_s, self._labels["hears"], partial(self._hear, link, output))

    def told_step(self, link: _SimWorkerLink, share: Share, step: int, used_block_count: int) -> None:
        """Send a step of a fast-forward to the dispatcher; called by the worker."""
        act = partial(self._hear_step, link, share, step, used_block_count)
        self._clock.after(self._delays.rpc_s, self._labels["hears"], act)

    def _hear_step(self, link: _SimWorkerLink, share: Share, step: int, used_block_count: int) -> None:
        """Record a step of a fast-forward. It is passed to the core at once if it may make room for a waiting request,
        otherwise later.
        """
        if not link.open:
            return
        if link.share is not share:
            if link.share is not None:
                self._catch_up_with(link)
            link.share, link.first, link.waits = share, step, share.pace.waiting_count > 0
            self._behind[link] = self._unheard[link] = None
        link.last, link.used = step, used_block_count
        link.instants_s.append(self._clock.now_s)
        if link.reported:
            link.reported = False
            self._unreported[link] = None
        if link.waits or self.core.waits:
            self._is_known(link)
            self._report_loads()
            self._catch_up_with(link)
            self._set_timer()

    def told_lost(self, link: _SimWorkerLink, why: str) -> None:
        def arrive() -> None:
            if link.open:
                link.open = False
                self.feed(d.WorkerLost(self._clock.now_s, link.key, why))
                self._clock.after(_AGAIN_S, self._labels["link"], partial(self._connect_again, link))

        self._be_reached(link, self._labels["link"], arrive)

    def _connect_again(self, lost: _SimWorkerLink) -> None:
        """Reopen a lost stream, unless the core has closed it."""
        if self._links.get(lost.key) is lost:
            link = self._links[lost.key] = _SimWorkerLink(self, lost.key, lost.instance)
            self._reach(link, self._labels["link"], partial(self._connect, link))

    def _hear(self, link: _SimWorkerLink, output: SimOutput) -> None:
        if self._lines.troubled:
            self._lines.bring(link.key.worker_id, self.name, partial(self._hear_now, link, output))
        else:
            self._hear_now(link, output)

    def _hear_now(self, link: _SimWorkerLink, output: SimOutput) -> None:
        if not link.open:
            return
        emit, now_s = output.emit, self._clock.now_s
        if emit is None:
            self.feed(d.StepReceived(now_s, link.key, (), (), (), (), (), (), output.load, output.seen_handle))
            return
        endings = [
            d.Ending(
                *(e.handle, e.finish_reason, e.matched_stop, e.error, e.refused, e.invalid, e.moved_to),
                e.cached_token_count,
            )
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
                emit.preempted,
                emit.resumed,
                emit.marks,
            )
        )
