"""KV on its way between the members of a transition: the counterpart of `services.worker.pipeline.exchange`."""

from collections.abc import Callable
from typing import Protocol

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.plan import transfers
from services.worker.core.stage import StageBook
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import Event, ExpectKv, KvReceived, KvSent, SendKv
from services.worker.pipeline.status import Progress
from sim.network import Bulk, Network

_NEVER = 0.0  # the transition looks at no instant of these events


class Counterpart(Protocol):
    """The member at the other end."""

    def kv_asked(self, epoch: Epoch, sequence_id: SequenceId, peer: WorkerId) -> None: ...

    def kv_came(self, epoch: Epoch, sequence_id: SequenceId, source: WorkerId) -> None: ...

    def kv_gone(self, epoch: Epoch, sequence_id: SequenceId, to: WorkerId, size_bytes: int) -> None: ...


Say = Callable[[WorkerId, Callable[[Counterpart], None]], None]


class Exchange:
    """The KV that comes and goes in one transition. A receiver asks once its blocks are ready."""

    def __init__(
        self,
        transition: Transition,
        progress: Progress,
        *,
        book: StageBook,
        block_bytes: int,
        block_tokens: int,
        network: Network,
        tell: Say,
        post: Say,
        drive: Callable[[Event], None],
    ) -> None:
        """`tell` sends a message, `post` puts something into the inbox of whom the network has told already."""
        self._transition = transition
        self._progress = progress
        self._book = book
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._network = network
        self._tell = tell
        self._post = post
        self._drive = drive
        self._to_send: dict[tuple[SequenceId, WorkerId], list[SendKv]] = {}
        self._asked: set[tuple[SequenceId, WorkerId]] = set()
        self._unsent: dict[tuple[SequenceId, WorkerId], int] = {}
        self._due: dict[tuple[SequenceId, WorkerId], int] = {}
        self._sent: dict[SequenceId, None] = {}  # whose KV has gone from here, or is on its way

    def expect(self, command: ExpectKv) -> None:
        transition, victim = self._transition, command.victim
        self._book.hold(victim.sequence_id, victim.computed_tokens)
        leader = transition.part.new.leader.worker_id
        for source, to, first, last in transfers(transition.plan, victim, leader):
            if to != transition.me:
                continue
            key = (victim.sequence_id, source)
            self._due[key] = self._due.get(key, 0) + 1
            self._progress.kv_bytes_received += self._size(victim.computed_tokens, last - first)
        for source in command.sources:
            self._ask(source, victim.sequence_id)

    def _ask(self, source: WorkerId, sequence_id: SequenceId) -> None:
        epoch, me = self._transition.epoch, self._transition.me
        self._tell(source, lambda m: m.kv_asked(epoch, sequence_id, me))

    def send(self, command: SendKv) -> None:
        key = (command.victim.sequence_id, command.to)
        self._to_send.setdefault(key, []).append(command)
        self._sent[command.victim.sequence_id] = None
        layers = command.last_layer - command.first_layer
        self._progress.kv_bytes_to_send += self._size(command.victim.computed_tokens, layers)
        if key in self._asked:
            self._start(key)

    def asked(self, sequence_id: SequenceId, peer: WorkerId) -> None:
        key = (sequence_id, peer)
        self._asked.add(key)
        self._start(key)

    def _start(self, key: tuple[SequenceId, WorkerId]) -> None:
        commands = self._to_send.pop(key, [])
        if commands:
            self._unsent[key] = len(commands)
        for command in commands:
            self._send_one(key, self._size(command.victim.computed_tokens, command.last_layer - command.first_layer))

    def _send_one(self, key: tuple[SequenceId, WorkerId], size_bytes: int) -> None:
        (sequence_id, to), epoch, me = key, self._transition.epoch, self._transition.me

        def done() -> None:
            self._post(to, lambda m: m.kv_came(epoch, sequence_id, me))
            self._post(me, lambda m: m.kv_gone(epoch, sequence_id, to, size_bytes))

        self._network.transfer(me, to, size_bytes, Bulk.KV, done)

    def came(self, sequence_id: SequenceId, source: WorkerId) -> None:
        key = (sequence_id, source)
        self._due[key] = self._due.get(key, 1) - 1
        if self._due[key] == 0:
            self._drive(KvReceived(_NEVER, self._transition.epoch, sequence_id, source))

    def gone(self, sequence_id: SequenceId, to: WorkerId, size_bytes: int) -> None:
        key = (sequence_id, to)
        self._progress.kv_bytes_sent += size_bytes
        self._unsent[key] -= 1
        if not self._unsent[key]:
            del self._unsent[key]
            self._drive(KvSent(_NEVER, self._transition.epoch, sequence_id, to))

    def take_sent(self) -> tuple[SequenceId, ...]:
        """Whose KV has gone from here since the last time. Nothing is on its way."""
        sent, self._sent = tuple(self._sent), {}
        return sent

    def _size(self, computed_tokens: int, layer_count: int) -> int:
        return blocks_for(computed_tokens, self._block_tokens) * self._block_bytes * layer_count
