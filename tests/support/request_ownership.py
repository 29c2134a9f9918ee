"""One request, a dispatcher's core, two workers, and the faults between them, for `tests.support.exhaustive`.

The workers are minimal: in any order, they generate tokens, end the request, hand it over, refuse, fail, vanish and
return. A token is its position in the answer, so that a lost, duplicated or misplaced one is obvious.
"""

from collections.abc import Callable, Iterator

from ballast.common.ids import DispatcherId, RequestId
from ballast.common.sampling import FinishReason
from services.dispatcher.core.dispatcher import DispatcherCore
from services.dispatcher.core.events import (
    AbortOnWorker,
    Command,
    Deliver,
    DispatcherTick,
    Ending,
    Event,
    Fail,
    Finish,
    LayoutChanged,
    PlaceOnWorker,
    RequestSubmitted,
    StepReceived,
    Withdrawn,
    WorkerConnected,
    WorkerLost,
)
from services.dispatcher.core.limits import Limits
from services.dispatcher.core.placement import PlacementRules
from services.dispatcher.policy.freeness import RoutingRules, WorkerKey
from tests.support.dispatcher_core import MODEL, key, layout, load, request

NAME = RequestId("r")
_SOON_S = 20.0  # later timers matter only to clusters that lack workers for long


class Peer:
    """A worker at the other end of a stream. Both directions are ordered, and end together."""

    def __init__(self) -> None:
        self.connected = True
        self.to_worker: list[PlaceOnWorker | AbortOnWorker] = []
        self.to_dispatcher: list[tuple[int, list[int], Ending | None]] = []  # handle, tokens
        self.running: dict[int, int] = {}  # handle -> the next token
        self.seen_handle = 0


class Ownership:
    def __init__(self, losses: int, token_count: int = 2) -> None:
        """`losses`: total number of faults; `token_count`: length of the answer."""
        self.core = DispatcherCore(DispatcherId("d"), Limits(), PlacementRules(), RoutingRules(growth_tokens=0))
        self.losses, self.token_count = losses, token_count
        self.peers = {key("a"): Peer(), key("b"): Peer()}
        self.now_s = 0.0
        self.received: list[int] = []
        self.ending = ""
        self.withdrawn = False
        self.tell(LayoutChanged(0.0, layout(1, *self.peers)))
        for worker in self.peers:
            self.tell(WorkerConnected(0.0, worker, MODEL, load(), 8))
        self.tell(RequestSubmitted(0.0, request(NAME, max_tokens=token_count, deadline_at_s=1e9)))

    def key(self) -> object:
        core = self.core
        books = [(w.key, w.connected, w.placed, w.unseen, w.preempted, w.hold_until_s > self.now_s) for w in core.fleet]
        tracked = [
            (t.worker, t.handle, t.moving, t.attempt, t.replay_count, t.idle_move_count, t.output_token_ids)
            for t in core.requests.values()
        ]
        return books, tracked, self.peers, self.received, self.ending, self.withdrawn, self.losses

    # ------------------------------------------------------------------------------------------ actions

    def tell(self, event: Event) -> None:
        for command in self.core.handle(event):
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case PlaceOnWorker() | AbortOnWorker():
                if self.peers[command.worker].connected:
                    self.peers[command.worker].to_worker.append(command)
            case Deliver():
                assert not self.ending, "a token after the ending"
                self.received += command.token_ids
            case Finish() | Fail():
                assert not self.ending, f"ends twice: {self.ending}, then {command}"
                self.ending = type(command).__name__
                assert self.withdrawn or isinstance(command, Finish), f"lost: {command}"
            case _:
                pass

    def actions(self) -> Iterator[tuple[str, Callable[["Ownership"], None]]]:
        for worker, peer in self.peers.items():
            name = worker.worker_id
            if not peer.connected:
                yield f"{name} is back", lambda w, k=worker: w.connect(k)
                continue
            if peer.to_worker:
                yield f"{name} hears {_what(peer.to_worker[0])}", lambda w, k=worker: w.hear(k)
            if peer.to_dispatcher:
                yield f"{name} is heard", lambda w, k=worker: w.be_heard(k)
            for handle in peer.running:
                yield f"{name} says a token of {handle}", lambda w, k=worker, h=handle: w.say(k, h)
                if self.losses:
                    yield f"fault: {name} hands {handle} over", lambda w, k=worker, h=handle: w.hand_over(k, h)
                    yield f"fault: {name} fails {handle}", lambda w, k=worker, h=handle: w.fail(k, h)
            if self.losses:
                yield f"fault: {name} is lost", lambda w, k=worker: w.lose(k)
                if peer.to_worker and isinstance(peer.to_worker[0], PlaceOnWorker):
                    yield f"fault: {name} refuses", lambda w, k=worker: w.refuse(k)
        if self.losses and not self.withdrawn and not self.ending:
            yield "fault: the client leaves", lambda w: w.withdraw()
        if self.core.next_timer_s() < self.now_s + _SOON_S:
            yield "time passes", lambda w: w.tick()

    def connect(self, worker: WorkerKey) -> None:
        self.peers[worker] = Peer()
        self.tell(WorkerConnected(self.now_s, worker, MODEL, load(), 8))

    def hear(self, worker: WorkerKey) -> None:
        peer = self.peers[worker]
        message = peer.to_worker.pop(0)
        if isinstance(message, PlaceOnWorker):
            assert list(message.output_token_ids) == self.received, "resumed elsewhere after different tokens"
            peer.running[message.handle] = len(message.output_token_ids)
            peer.seen_handle = message.handle
        elif message.handle in peer.running:
            del peer.running[message.handle]
            peer.to_dispatcher.append((message.handle, [], Ending(message.handle, FinishReason.CANCELLED)))

    def say(self, worker: WorkerKey, handle: int) -> None:
        peer = self.peers[worker]
        token = peer.running[handle]
        peer.running[handle] = token + 1
        ending = Ending(handle, FinishReason.LENGTH) if token + 1 == self.token_count else None
        if ending is not None:
            del peer.running[handle]
        peer.to_dispatcher.append((handle, [token], ending))

    def hand_over(self, worker: WorkerKey, handle: int) -> None:
        other = next(one for one in self.peers if one != worker)
        self._end(worker, Ending(handle, None, moved_to=other.worker_id))

    def fail(self, worker: WorkerKey, handle: int) -> None:
        self._end(worker, Ending(handle, FinishReason.ERROR, error="a step failed"))

    def _end(self, worker: WorkerKey, ending: Ending) -> None:
        self.losses -= 1
        del self.peers[worker].running[ending.handle]
        self.peers[worker].to_dispatcher.append((ending.handle, [], ending))

    def refuse(self, worker: WorkerKey) -> None:
        self.losses -= 1
        peer = self.peers[worker]
        handle = peer.to_worker.pop(0).handle
        peer.seen_handle = max(peer.seen_handle, handle)
        peer.to_dispatcher.append((handle, [], Ending(handle, None, refused=True)))

    def lose(self, worker: WorkerKey) -> None:
        self.losses -= 1
        self.peers[worker].__init__()
        self.peers[worker].connected = False
        self.tell(WorkerLost(self.now_s, worker, "reset"))

    def be_heard(self, worker: WorkerKey) -> None:
        handle, tokens, ending = self.peers[worker].to_dispatcher.pop(0)
        self.tell(
            StepReceived(
                at_s=self.now_s,
                worker=worker,
                handles=[handle] if tokens else [],
                token_counts=[len(tokens)] if tokens else [],
                token_ids=tokens,
                texts=[],
                logprobs=[],
                endings=[ending] if ending is not None else [],
                load=load(),
                seen_handle=self.peers[worker].seen_handle,
            )
        )

    def withdraw(self) -> None:
        self.losses -= 1
        self.withdrawn = True
        self.tell(Withdrawn(self.now_s, NAME, "left"))

    def tick(self) -> None:
        self.now_s = max(self.now_s, self.core.next_timer_s())
        self.tell(DispatcherTick(self.now_s))

    # ------------------------------------------------------------------------------------------ invariants

    def check(self) -> None:
        self.core.check()
        assert self.received == list(range(len(self.received))), f"tokens are {self.received}"
        assert self.ending != "Finish" or len(self.received) == self.token_count
        owners = [
            (worker.worker_id, handle)
            for worker, peer in self.peers.items()
            for handle in peer.running
            if not any(isinstance(m, AbortOnWorker) and m.handle == handle for m in peer.to_worker)
        ]
        assert len(owners) <= (not self.ending), f"{self.ending or 'it goes on'}, and workers have it: {owners}"

    def check_end(self) -> None:
        assert self.ending, "the request waits forever"
        assert not any(peer.running for peer in self.peers.values()), "a worker still runs a request that has ended"


def _what(message: PlaceOnWorker | AbortOnWorker) -> str:
    return f"{'place' if isinstance(message, PlaceOnWorker) else 'abort'} {message.handle}"
