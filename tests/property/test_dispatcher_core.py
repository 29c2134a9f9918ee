"""Arbitrary histories of a dispatcher: no token is lost, duplicated or skipped, and the accounting is consistent after
every event.

The state machine plays the workers. Each token is its own position in the answer, so that a repeated or skipped one is
obvious.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ballast.common.errors import Overloaded
from ballast.common.ids import RequestId
from ballast.common.sampling import FinishReason, PriorityClass
from services.dispatcher.core import events as d
from services.dispatcher.core.limits import Limits
from services.dispatcher.core.placement import PlacementRules
from services.dispatcher.policy.freeness import RoutingRules, WorkerKey
from tests.support.dispatcher_core import BLOCK_TOKENS, Answer, Story, key, load

NAMES = ("a", "b", "c")
LIMITS = Limits(
    max_queued_request_count=5,
    max_queued_token_count=600,
    replay_limit=2,
    no_worker_timeout_s=3.0,
    move_wait_s=1.5,
)


@dataclass
class PlayedWorker:
    """A worker's state: its requests in order of arrival, and the last handle that it has processed."""

    key: WorkerKey
    requests: dict[int, d.PlaceOnWorker] = field(default_factory=dict[int, d.PlaceOnWorker])
    generated: dict[int, int] = field(default_factory=dict[int, int])  # handle -> tokens generated so far
    unread: list[d.PlaceOnWorker] = field(default_factory=list[d.PlaceOnWorker])
    seen_handle: int = 0
    asked_back: set[int] = field(default_factory=set[int])  # handles recalled by the dispatcher
    preempted: set[int] = field(default_factory=set[int])  # handles of preempted requests, some of which have ended

    def read(self, count: int) -> None:
        for place in self.unread[:count]:
            self.requests[place.handle] = place
            self.generated[place.handle] = len(place.output_token_ids)
            self.seen_handle = place.handle
        del self.unread[:count]

    def blocks(self) -> int:
        return sum(
            -(-(len(p.request.prompt_token_ids) + self.generated[h] + 1) // BLOCK_TOKENS)
            for h, p in self.requests.items()
        )


class DispatcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.story = Story(
            limits=LIMITS,
            placement=PlacementRules(large_patience_s=1.0, scan_count=4),
            routing=RoutingRules(worker_queue_count=2, growth_tokens=16),
        )
        self.linked: set[WorkerKey] = set()  # according to Connect and Disconnect
        self.workers: dict[WorkerKey, PlayedWorker] = {}  # workers with a stream
        self.draining: set[WorkerKey] = set()
        self.layout: dict[str, int] = {}  # worker -> incarnation
        self.groups: list[list[str]] = []  # leader first in each group
        self.moved_at_s: dict[str, float] = {}  # request -> when a worker last reported handing it over
        self.accepted: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.tokens: dict[str, int] = {}  # request -> number of tokens delivered
        self.serial = 0
        self.given_back = 0

    def take(self, answer: Answer) -> Answer:
        for command in answer.commands:
            match command:
                case d.Connect(worker=worker):
                    self.linked.add(worker)
                case d.Disconnect(worker=worker):
                    self.linked.remove(worker)
                    self.workers.pop(worker, None)
                case d.PlaceOnWorker():
                    worker = self.workers[command.worker]  # KeyError: placed on a worker without a stream
                    if command.expects_handover:
                        assert command.request.request_id in self.moved_at_s
                    else:
                        assert command.worker not in self.draining
                        assert command.worker in self.leaders
                    assert len(command.output_token_ids) == self.tokens[command.request.request_id]
                    assert command.delivered_text_chars == len(command.output_token_ids)
                    worker.unread.append(command)
                case d.AbortOnWorker(worker=key_, handle=handle):
                    worker = self.workers.get(key_)
                    book = self.story.core.fleet.get(key_)
                    if worker is not None and book is not None and handle in book.placed:
                        assert handle in worker.preempted or book.placed[handle].first_token_at_s is None
                        worker.asked_back.add(handle)  # the worker still has the request until it confirms the recall
                    elif worker is not None:
                        worker.requests.pop(handle, None)
                        worker.unread = [place for place in worker.unread if place.handle != handle]
                case d.Deliver(request_id=request_id, token_ids=token_ids):
                    assert not self.ended[request_id]
                    expected = range(self.tokens[request_id], self.tokens[request_id] + len(token_ids))
                    assert list(token_ids) == list(expected)
                    self.tokens[request_id] += len(token_ids)
                case d.Finish(request_id=request_id) | d.Fail(request_id=request_id):
                    self.ended[request_id] += 1
                    assert request_id in self.accepted
                    assert command.facts.completion_token_count == self.tokens[request_id]
                case d.Refuse(error=error):
                    if isinstance(error, Overloaded):
                        assert 0.1 <= error.retry_after_s <= 30.0
        return answer

    @property
    def leaders(self) -> set[WorkerKey]:
        return {key(group[0], self.layout[group[0]]) for group in self.groups}

    @initialize()
    def two_workers(self) -> None:
        self.layout = {"a": 1, "b": 1}
        self.groups = [["a"], ["b"]]
        self.take(self.story.adopt(key("a"), key("b")))
        for name in self.layout:
            self.workers[key(name)] = PlayedWorker(key(name))
            self.take(self.story.connect(name))

    # ------------------------------------------------------------------ clients

    @rule(
        prompt=st.sampled_from([1, 15, 16, 100, 300, 1500]),
        priority=st.sampled_from(PriorityClass),
        patience_s=st.sampled_from([0.5, 5.0, 1000.0]),
        answered=st.sampled_from([None, None, 0, 3, 16]),
    )
    def submit(self, prompt: int, priority: PriorityClass, patience_s: float, answered: int | None) -> None:
        """`answered`: tokens already delivered by another dispatcher, which was serving the request and died."""
        name = f"r{self.serial}"
        self.serial += 1
        self.tokens[name] = answered or 0
        self.accepted.add(name)
        deadline_at_s = self.story.now_s + patience_s
        answer = self.story.submit(
            name,
            prompt=prompt,
            priority=priority,
            deadline_at_s=deadline_at_s,
            answer=range(answered or 0),
            taken_over=answered is not None,
        )
        if answer.of(d.Refuse):
            self.accepted.remove(name)
        self.take(answer)

    @rule(data=st.data())
    @precondition(lambda self: self.accepted)
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.accepted)))
        self.take(self.story.handle(d.Withdrawn(self.story.now_s, RequestId(name), "gone")))
        assert self.ended[name] == 1

    # ------------------------------------------------------------------ workers

    @rule(name=st.sampled_from(NAMES), change=st.sampled_from(["up", "up", "down", "drain", "new life"]))
    def change_layout(self, name: str, change: str) -> None:
        life = self.layout.get(name, 1)
        if change == "down":
            self.layout.pop(name, None)
            self.groups = [rest for group in self.groups if (rest := [member for member in group if member != name])]
        else:
            self.layout[name] = life + 1 if change == "new life" else life
            if not any(name in group for group in self.groups):
                self.groups.append([name])
        self.draining.discard(key(name, life))
        if change == "drain":
            self.draining.add(key(name, self.layout[name]))
        self.publish()

    @rule(one=st.sampled_from(NAMES), other=st.sampled_from(NAMES), behind=st.booleans())
    def merge(self, one: str, other: str, behind: bool) -> None:
        """Merges the groups of the two workers, in either order."""
        found = [group for group in self.groups if one in group or other in group]
        if len(found) == 2:
            first, second = found if behind else reversed(found)
            self.groups = [group for group in self.groups if group not in found] + [first + second]
            self.publish()

    @rule()
    @precondition(lambda self: any(len(group) > 1 for group in self.groups))
    def dissolve(self) -> None:
        self.groups = [[name] for name in sorted(self.layout)]
        self.publish()

    def publish(self) -> None:
        groups = [[key(name, self.layout[name]) for name in group] for group in self.groups]
        members = {member for group in groups for member in group}
        self.draining &= members
        self.take(self.story.adopt_groups(*groups, draining=sorted(self.draining)))
        assert self.leaders <= self.linked <= members

    @rule(data=st.data())
    @precondition(lambda self: self.linked - self.workers.keys())
    def connect(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from(sorted(self.linked - self.workers.keys())))
        self.workers[found] = PlayedWorker(found)
        self.take(self.story.connect(found.worker_id, incarnation=found.incarnation))

    @rule(data=st.data())
    @precondition(lambda self: self.workers)
    def lose(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[found]
        self.take(self.story.lose(found.worker_id, incarnation=found.incarnation))

    @rule(
        data=st.data(),
        read=st.integers(0, 3),
        what=st.sampled_from(["tokens", "tokens", "nothing", "nothing", "finish", "refuse", "error", "move", "move"]),
    )
    @precondition(lambda self: self.workers)
    def step(self, data: st.DataObject, read: int, what: str) -> None:
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        worker.read(read)
        subset = set(worker.requests)
        if len(subset) > 1 and data.draw(st.booleans()):
            subset = {data.draw(st.sampled_from(sorted(subset)))}
        tokens: dict[int, list[int]] = {}
        endings: list[d.Ending] = []
        for handle in sorted(subset):
            begin = worker.generated[handle]
            if what in ("tokens", "finish") or (what == "move" and data.draw(st.booleans())):
                tokens[handle] = list(range(begin, begin + 1 + handle % 3))
                worker.generated[handle] += len(tokens[handle])
            if what == "finish":
                endings.append(d.Ending(handle, FinishReason.STOP))
            elif what == "refuse" and begin == len(worker.requests[handle].output_token_ids):
                endings.append(d.Ending(handle, None, refused=True))
            elif what == "move":
                endings.append(d.Ending(handle, None, moved_to=data.draw(st.sampled_from((*NAMES, "unheard-of")))))
                self.moved_at_s[worker.requests[handle].request.request_id] = self.story.now_s
            elif what == "error":
                endings.append(d.Ending(handle, FinishReason.ERROR, error="engine", invalid=handle % 2 == 0))
        ended = {ending.handle for ending in endings}
        given_back = sorted(worker.asked_back & worker.requests.keys() - ended)
        self.given_back += len(given_back)
        endings += [d.Ending(handle, FinishReason.CANCELLED) for handle in given_back]
        for ending in endings:
            del worker.requests[ending.handle]
        worker.asked_back &= {place.handle for place in worker.unread}
        worker.preempted -= tokens.keys()
        moved = [ending for ending in endings if ending.moved_to]
        blocks = worker.blocks()
        report = load(
            used_block_count=min(64, blocks),
            waiting_block_count=max(0, blocks - 64),
            running_count=len(worker.requests),
            waiting_count=data.draw(st.integers(0, min(2, len(worker.requests)))),
        )
        self.take(
            self.story.raw_step(
                worker.key.worker_id,
                tokens,
                endings=endings,
                report=report,
                seen_handle=worker.seen_handle,
                texts=["x" * len(ids) for ids in tokens.values()],
                incarnation=worker.key.incarnation,
            )
        )
        if moved and data.draw(st.booleans()):  # the move is reported twice
            answer = self.story.raw_step(
                worker.key.worker_id,
                {},
                endings=moved,
                report=report,
                seen_handle=worker.seen_handle,
                incarnation=worker.key.incarnation,
            )
            assert not [place for place in self.take(answer).of(d.PlaceOnWorker) if place.expects_handover]

    @property
    def busy(self) -> list[WorkerKey]:
        return sorted(key_ for key_, worker in self.workers.items() if worker.requests or worker.unread)

    @rule(data=st.data(), then=st.sampled_from(["waits", "runs again", "gets a token"]))
    @precondition(lambda self: self.busy)
    def preempt(self, data: st.DataObject, then: str) -> None:
        worker = self.workers[data.draw(st.sampled_from(self.busy))]
        worker.read(len(worker.unread))
        handle = data.draw(st.sampled_from(sorted(worker.requests)))
        if handle not in worker.preempted:
            self.say(worker, preempted=[handle])
        if then == "runs again":
            self.say(worker, resumed=[handle])
        elif then == "gets a token":
            self.say(worker, {handle: [worker.generated[handle]]})
            worker.generated[handle] += 1

    def say(
        self,
        worker: PlayedWorker,
        tokens: Mapping[int, list[int]] = MappingProxyType({}),
        preempted: Sequence[int] = (),
        resumed: Sequence[int] = (),
    ) -> None:
        worker.preempted = (worker.preempted | set(preempted)) - set(resumed) - tokens.keys()
        self.take(
            self.story.raw_step(
                worker.key.worker_id,
                tokens,
                texts=["x" for _ in tokens],
                report=load(used_block_count=64, running_count=1, waiting_count=len(worker.requests)),
                seen_handle=worker.seen_handle,
                preempted=preempted,
                resumed=resumed,
                incarnation=worker.key.incarnation,
            )
        )

    @rule(data=st.data(), preempts=st.booleans())
    @precondition(lambda self: self.busy)
    def nothing_moves(self, data: st.DataObject, preempts: bool) -> None:
        """A worker has read all messages but admits no request, so that its waiting requests may be recalled."""
        crowded = data.draw(st.sampled_from(self.busy))
        worker = self.workers[crowded]
        worker.read(len(worker.unread))
        if preempts:
            self.say(worker, preempted=sorted(worker.requests.keys() - worker.preempted))
        self.tick(0.3)
        for key_ in [*(other for other in sorted(self.workers) if other != crowded), crowded]:
            worker = self.workers.get(key_)
            if worker is None:
                continue  # a former leader whose last request has ended meanwhile
            waits = load(used_block_count=64, running_count=1, waiting_count=max(1, len(worker.requests)))
            self.take(
                self.story.raw_step(
                    key_.worker_id,
                    {},
                    report=waits if key_ == crowded else load(),
                    seen_handle=worker.seen_handle,
                    incarnation=key_.incarnation,
                )
            )

    @rule(handle=st.integers(0, 50), data=st.data())
    @precondition(lambda self: self.workers)
    def say_something_stale(self, handle: int, data: st.DataObject) -> None:
        """Reports about a handle that this incarnation of the worker does not have."""
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        known = worker.requests.keys() | {place.handle for place in worker.unread}
        if handle in known:
            return
        before = self.story.core.relay.stale_count
        answer = self.story.raw_step(
            worker.key.worker_id,
            {handle: [12345]},
            report=load(running_count=8, used_block_count=64, waiting_count=9),
            seen_handle=worker.seen_handle,
            preempted=[handle],
            incarnation=worker.key.incarnation,
        )
        assert not answer.of(d.Deliver)
        assert self.story.core.relay.stale_count == before + 2

    # ------------------------------------------------------------------ time

    @rule(pass_s=st.sampled_from([0.01, 0.3, 1.0, 4.0]))
    def tick(self, pass_s: float) -> None:
        self.story.now_s += pass_s
        self.take(self.story.handle(d.DispatcherTick(self.story.now_s)))
        for name, tracked in self.story.core.requests.items():
            assert tracked.request.deadline_at_s > self.story.now_s, f"{name} has outlived its deadline"
            assert not tracked.moving or self.moved_at_s[name] + LIMITS.move_wait_s > self.story.now_s, f"{name} waits"
        assert self.story.core.next_timer_s() > self.story.now_s

    # ------------------------------------------------------------------ invariants

    @invariant()
    def every_accepted_request_is_here_or_has_ended_once(self) -> None:
        here = {str(name) for name in self.story.core.requests}
        ended = {name for name, count in self.ended.items() if count}
        assert all(count <= 1 for count in self.ended.values())
        assert here | ended == self.accepted
        assert not here & ended

    @invariant()
    def a_stream_is_kept_to_leaders_and_to_those_who_still_have_requests(self) -> None:
        books = {worker.key: worker for worker in self.story.core.fleet}
        assert books.keys() == self.linked
        assert all(books[worker].placed for worker in self.linked - self.leaders)

    @invariant()
    def workers_know_what_the_books_say(self) -> None:
        for worker in self.workers.values():
            book = self.story.core.fleet.get(worker.key)
            assert book is not None
            assert set(book.placed) == worker.requests.keys() | {place.handle for place in worker.unread}
            assert {place.handle for place in worker.unread} <= set(book.unseen) | {
                handle for handle in book.placed if handle <= worker.seen_handle
            }
            assert set(book.preempted) == worker.preempted & worker.requests.keys()

    def teardown(self) -> None:
        self.take(self.story.handle(d.DispatcherDrainRequested(self.story.now_s)))
        self.take(self.story.handle(d.TimeIsUp(self.story.now_s)))
        assert not self.story.core.requests
        assert self.story.core.recall_count == self.given_back
        assert set(self.ended.elements()) == self.accepted
        assert all(count <= 1 for count in self.ended.values())


TestDispatcherMachine = DispatcherMachine.TestCase
TestDispatcherMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
