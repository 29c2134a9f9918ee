"""Workers that migrate sequences to one another in virtual time: messages are lost, doubled and overtaken, links end,
workers die and come back, sequences end or give way, and layouts change.

A block knows whose tokens it holds. What is read for a transfer is read at its end, when it may be another's by then.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import PriorityClass, SamplingParams
from services.worker.core.arrivals import Arrivals
from services.worker.core.blocks import BlockBook, blocks_for
from services.worker.core.departures import Departures
from services.worker.core.migration_messages import (
    Adopt,
    DropOrphan,
    Expect,
    HandAway,
    Handed,
    Message,
    Off,
    Offer,
    Release,
    Report,
    Say,
    SendSpan,
    SourceCommand,
    StopExpecting,
    Taken,
    TargetCommand,
    Want,
    Withdrawn,
)
from services.worker.core.snapshot import SequenceSnapshot

BLOCK_TOKENS = 4
STEP_S = 0.01
BUSY_S = 1.5  # then nothing disturbs any more, and workers step slowly
Content = tuple[int, int, int]  # sequence, which of its blocks, tokens of it with KV


@dataclass
class Worker:
    name: WorkerId
    life: int
    block_count: int
    book: BlockBook = field(init=False)
    departures: Departures = field(init=False)
    arrivals: Arrivals = field(init=False)
    running: dict[int, int] = field(default_factory=dict[int, int])  # sequence -> tokens with KV
    waiting: set[int] = field(default_factory=set[int])  # adopted without KV
    kv: dict[int, Content] = field(default_factory=dict[int, Content])  # by block
    expected: dict[int, Expect] = field(default_factory=dict[int, Expect])
    changes: bool = False  # its layout

    def __post_init__(self) -> None:
        self.book = BlockBook(self.block_count, BLOCK_TOKENS)
        self.departures = Departures(BLOCK_TOKENS, 3)
        self.arrivals = Arrivals(BLOCK_TOKENS, self.why_no_room)

    def why_no_room(self, blocks: int, new: bool) -> str:
        return "" if blocks + new <= self.book.free_count else "full"

    def write(self, sequence_id: int, tokens: int) -> None:
        """The KV of its first `tokens` is here."""
        table = self.book.hold(sequence_id, tokens)
        for index in range(-(-tokens // BLOCK_TOKENS)):
            self.kv[table[index]] = sequence_id, index, min(BLOCK_TOKENS, tokens - index * BLOCK_TOKENS)

    def holds(self, sequence_id: int, tokens: int) -> bool:
        table = self.book.table(sequence_id)
        wanted = [
            (sequence_id, i, min(BLOCK_TOKENS, tokens - i * BLOCK_TOKENS)) for i in range(-(-tokens // BLOCK_TOKENS))
        ]
        return len(table) == len(wanted) and [self.kv.get(block) for block in table] == wanted


class Cluster:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties, self._ids, self._lives = count(), count(1), count(1)
        names = [WorkerId(f"w{i}") for i in range(rng.choice([2, 2, 3]))]
        self.workers = {name: Worker(name, next(self._lives), rng.choice([12, 30, 60])) for name in names}
        self.loss, self.doubling = rng.choice([0.0, 0.0, 0.02, 0.1]), rng.choice([0.0, 0.1])
        self.delay_s = rng.choice([0.001, 0.01, 0.1])
        self.owner: dict[int, WorkerId] = {}  # who has a sequence, as its dispatcher sees it
        self.generation: dict[tuple[WorkerId, WorkerId], int] = {}  # of links
        self.reports: list[Report] = []
        self.adopted = self.adopted_anew = self.ended = self.too_late = 0

    # ------------------------------------------------------------ time

    def at(self, after_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + after_s, next(self._ties), what))

    def run(self, until_s: float, disturb: Callable[[], None]) -> None:
        for worker in self.workers.values():
            self.at(self.rng.random() * STEP_S, lambda n=worker.name: self._step(n))
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._events)
            what()
            if self.rng.random() < 0.05:
                disturb()
            self.check()

    def _step(self, name: WorkerId) -> None:
        """A boundary, then every sequence that fits gets a token."""
        worker = self.workers[name]
        self.do(worker, worker.arrivals.tick(self.now_s))
        self.do(worker, worker.departures.look(self.now_s, worker.running.get))
        for sequence_id, tokens in list(worker.running.items()):
            room = len(worker.book.table(sequence_id)) + worker.book.free_count
            if blocks_for(tokens + 1, BLOCK_TOKENS) > room:
                self.lose(sequence_id)  # it gives way
            else:
                worker.running[sequence_id] = tokens + 1
                worker.write(sequence_id, tokens + 1)
        self.at((STEP_S if self.now_s < BUSY_S else 0.5) * self.rng.uniform(0.5, 1.5), lambda: self._step(name))

    # ------------------------------------------------------------ what may happen

    def submit(self) -> None:
        worker = self.rng.choice(list(self.workers.values()))
        tokens = self.rng.randrange(1, 30)
        if -(-tokens // BLOCK_TOKENS) <= worker.book.free_count:
            sequence_id = worker.life << 32 | next(self._ids)
            self.owner[sequence_id] = worker.name
            worker.running[sequence_id] = tokens
            worker.write(sequence_id, tokens)

    def migrate(self) -> None:
        source, target = self.rng.sample(list(self.workers.values()), 2)
        claimed = {s for s in source.running if self.owner.get(s) == source.name}
        free = sorted(claimed - source.departures.leaving)
        if free and source.departures.may_begin and not source.changes:
            sequence_id = self.rng.choice(free)
            migration_id = source.life << 32 | next(self._ids)
            tokens = source.running[sequence_id]
            self.do(source, source.departures.begin(self.now_s, migration_id, sequence_id, target.name, tokens))

    def end(self) -> None:
        """A client withdraws, or a sequence comes to its end."""
        if self.owner:
            self.lose(self.rng.choice(sorted(self.owner)), withdrawn=True)

    def lose(self, sequence_id: int, *, withdrawn: bool = False) -> None:
        worker = self.workers[self.owner.pop(sequence_id)]
        self.ended += 1
        if sequence_id in worker.running or sequence_id in worker.waiting:
            worker.running.pop(sequence_id, None)
            worker.waiting.discard(sequence_id)
            worker.book.release(sequence_id)
        elif withdrawn:  # on its way: its dispatcher has told the worker where it was
            self.too_late += 1
            for other in self.workers.values():
                self.do(other, other.departures.withdraw(sequence_id))

    def cut(self) -> None:
        one, other = self.rng.sample(sorted(self.workers), 2)
        self._cut(one, other)

    def _cut(self, one: WorkerId, other: WorkerId) -> None:
        key = (min(one, other), max(one, other))
        self.generation[key] = self.generation.get(key, 0) + 1
        for name, peer in ((one, other), (other, one)):
            worker = self.workers[name]
            self.do(worker, worker.departures.peer_lost(self.now_s, peer, "cut"))
            self.do(worker, worker.arrivals.peer_lost(peer))

    def crash(self) -> None:
        name = self.rng.choice(sorted(self.workers))
        for sequence_id in [s for s, owner in self.owner.items() if owner == name]:
            del self.owner[sequence_id]  # replayed elsewhere: another sequence
        self.workers[name] = Worker(name, next(self._lives), self.workers[name].block_count)
        for peer in [p for p in self.workers if p != name]:
            self._cut(name, peer)

    def change_layout(self) -> None:
        worker = self.rng.choice(list(self.workers.values()))
        worker.changes = not worker.changes
        if worker.changes:
            self.do(worker, worker.departures.give_up_all(self.now_s, "the layout changes"))
            self.do(worker, worker.arrivals.give_up_all("the layout changes"))

    # ------------------------------------------------------------ the network

    def _link(self, one: WorkerId, other: WorkerId) -> tuple[int, int, int]:
        key = (min(one, other), max(one, other))
        return self.generation.get(key, 0), self.workers[key[0]].life, self.workers[key[1]].life

    def _later(self, one: WorkerId, other: WorkerId, what: Callable[[], None], broken: Callable[[], None]) -> None:
        link = self._link(one, other)
        delay_s = self.rng.expovariate(1 / self.delay_s)
        self.at(delay_s, lambda: what() if self._link(one, other) == link else broken())

    def say(self, source: WorkerId, to: WorkerId, message: Message) -> None:
        times = 0 if self.rng.random() < self.loss else 1 + (self.rng.random() < self.doubling)
        for _ in range(times):
            self._later(source, to, lambda: self._hear(source, to, message), lambda: None)

    def _hear(self, source: WorkerId, to: WorkerId, message: Message) -> None:
        worker = self.workers[to]
        match message:
            case Offer():
                why_not = "its layout changes" if worker.changes else ""
                self.do(worker, worker.arrivals.offered(self.now_s, source, message, why_not))
            case Handed() | Withdrawn():
                self.do(worker, worker.arrivals.heard(self.now_s, source, message))
            case Want() | Taken():
                self.do(worker, worker.departures.heard(self.now_s, source, message))
            case Off():
                self.do(worker, worker.arrivals.heard(self.now_s, source, message))
                self.do(worker, worker.departures.heard(self.now_s, source, message))

    def _send(self, worker: Worker, command: SendSpan | HandAway) -> None:
        span, to, migration_id = command.span, command.to, command.migration_id
        table = worker.book.table(command.sequence_id)[span.first_block : span.last_block]
        copied = [worker.kv[b] for b in table] if span.last else None

        def open_() -> None:
            target = self.workers[to]
            expect = target.expected.get(migration_id)
            if expect is None or not expect.first_block == span.first_block <= span.last_block <= expect.last_block:
                self.do(worker, worker.departures.sent(self.now_s, migration_id, "nobody waits for this"))
                return
            del target.expected[migration_id]
            blocks = target.book.table(expect.sequence_id)[span.first_block : span.last_block]
            self._later(worker.name, to, lambda: end(target, expect, blocks), lambda: broken(target))

        def end(target: Worker, expect: Expect, blocks: Sequence[int]) -> None:
            assert target.book.table(expect.sequence_id)[span.first_block : span.last_block] == blocks
            for block, content in zip(blocks, copied or [worker.kv[b] for b in table], strict=True):
                target.kv[block] = content
            self.do(worker, worker.departures.sent(self.now_s, migration_id, ""))
            self.do(target, target.arrivals.landed(self.now_s, migration_id, span))

        def broken(target: Worker) -> None:
            if self.workers[to] is target:
                self.do(target, target.arrivals.landed(self.now_s, migration_id, None))

        self._later(worker.name, to, open_, lambda: None)

    # ------------------------------------------------------------ what workers do

    def do(self, worker: Worker, commands: Sequence[SourceCommand | TargetCommand]) -> None:
        for command in commands:
            match command:
                case Say(to=to, message=message):
                    self.say(worker.name, to, message)
                case SendSpan():
                    self._send(worker, command)
                case HandAway():
                    self._hand_away(worker, command)
                case Report():
                    self.reports.append(command)
                case Expect():
                    worker.book.hold(command.sequence_id, command.last_block * BLOCK_TOKENS)
                    worker.expected[command.migration_id] = command
                case StopExpecting(migration_id=migration_id):
                    if worker.expected.pop(migration_id, None) is not None:
                        self.do(worker, worker.arrivals.quiet(migration_id))
                case Release(sequence_id=sequence_id):
                    worker.book.release(sequence_id)
                case Adopt():
                    self._adopt(worker, command)
                case DropOrphan(sequence_id=sequence_id):
                    assert sequence_id not in self.owner
                    worker.running.pop(sequence_id, None)
                    worker.waiting.discard(sequence_id)
                    worker.book.release(sequence_id)

    def _hand_away(self, worker: Worker, command: HandAway) -> None:
        if self.rng.random() < 0.02:  # the link has just ended
            self.do(worker, worker.departures.give_up(self.now_s, command.migration_id, "the link takes nothing"))
            return
        sequence_id = command.sequence_id
        assert self.owner[sequence_id] == worker.name, "handed over twice"
        self.owner[sequence_id] = command.to
        tokens = worker.running.pop(sequence_id)
        assert tokens == command.span.token_count
        self._send(worker, command)
        worker.book.release(sequence_id)
        self.say(worker.name, command.to, Handed(command.migration_id, snapshot(sequence_id, tokens)))
        to, life = command.to, self.workers[command.to].life
        self.at(10.0, lambda: self._unclaimed(sequence_id, to, life))

    def _unclaimed(self, sequence_id: int, to: WorkerId, life: int) -> None:
        """The dispatcher's Submit has waited long enough for what was handed over: the request is computed anew."""
        worker = self.workers[to]
        known = sequence_id in worker.running or sequence_id in worker.waiting
        if worker.life == life and self.owner.get(sequence_id) == to and not known:
            del self.owner[sequence_id]

    def _adopt(self, worker: Worker, command: Adopt) -> None:
        sequence_id = command.snapshot.sequence_id
        assert sequence_id not in worker.running
        worker.book.trim(sequence_id, command.kv_tokens)
        if command.kv_tokens:
            assert worker.holds(sequence_id, command.kv_tokens), "it does not have its KV"
            worker.running[sequence_id] = command.kv_tokens
            self.adopted += 1
        else:
            assert not worker.book.table(sequence_id)
            worker.waiting.add(sequence_id)
            self.adopted_anew += 1
        if sequence_id not in self.owner:  # its client has gone; nobody will ask for it
            self.at(10.0, lambda: self._drop_orphan(worker, sequence_id))

    def _drop_orphan(self, worker: Worker, sequence_id: int) -> None:
        worker.running.pop(sequence_id, None)
        worker.waiting.discard(sequence_id)
        if sequence_id in worker.book.sequence_ids:
            worker.book.release(sequence_id)

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        for worker in self.workers.values():
            worker.departures.check()
            worker.arrivals.check()
            worker.book.check()
            held = sum(len(worker.book.table(s)) for s in worker.running)
            assert held + worker.arrivals.block_count == worker.book.used_count
            for sequence_id in worker.departures.leaving & worker.running.keys():
                assert self.owner[sequence_id] == worker.name
        places = [s for w in self.workers.values() for s in (*w.running, *w.waiting) if self.owner.get(s) == w.name]
        assert len(set(places)) == len(places)

    def check_at_rest(self) -> None:
        for worker in self.workers.values():
            assert not len(worker.departures), worker.departures._open
            assert not len(worker.arrivals), worker.arrivals._open
            assert not worker.expected
        for sequence_id, name in self.owner.items():
            worker = self.workers[name]
            assert sequence_id in worker.running or sequence_id in worker.waiting, "lost"


def snapshot(sequence_id: int, computed_tokens: int) -> SequenceSnapshot:
    return SequenceSnapshot(
        sequence_id=sequence_id,
        request_id=RequestId(f"r{sequence_id}"),
        attempt=1,
        priority=PriorityClass.DEFAULT,
        age_s=0.0,
        deadline_s=None,
        prompt_token_ids=(7,) * computed_tokens,
        output_token_ids=(7,),
        sampling=SamplingParams(seed=1),
        wants_text=False,
        computed_tokens=computed_tokens,
        on_stages=True,
        suspended=False,
        gone=False,
        held_text="",
        skip_chars=0,
        passed_chars=0,
        emitted_token_count=1,
        emitted_chars=0,
        unsent_text="",
        unsent_logprobs=(),
        finish_reason=None,
        matched_stop="",
        error="",
        invalid=False,
    )


def story(seed: int) -> Cluster:
    """Disturbances, then time enough for everybody's patience to end."""
    cluster = Cluster(seed)
    rng = cluster.rng
    actions = [
        (10, cluster.submit),
        (20, cluster.migrate),
        (rng.choice([1, 6]), cluster.end),
        (rng.choice([0, 4]), cluster.cut),
        (rng.choice([0, 0.5]), cluster.crash),
        (rng.choice([0, 2]), cluster.change_layout),
    ]
    names, weights = [a for _, a in actions], [w for w, _ in actions]
    for _ in range(4):
        cluster.submit()

    def disturb() -> None:
        if cluster.now_s < BUSY_S:
            rng.choices(names, weights)[0]()

    cluster.run(BUSY_S, disturb)
    for sequence_id in sorted(cluster.owner)[3:]:
        cluster.lose(sequence_id, withdrawn=True)
    cluster.run(24.0, lambda: None)
    cluster.check_at_rest()
    return cluster
