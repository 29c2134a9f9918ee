"""Attention for sequences whose KV is on its way: this member asks the holders, and answers for what it sends itself.

Questions are asked on the engine thread, in the middle of a batch, and answered on a thread of their own: two stages
may wait for each other's answers at the same time. A holder may hear a question before it has come to the roster that
makes it one; it has come to it if its own engine waits in that wave, so waiting for that ends.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from itertools import count
from threading import Condition, Lock, Thread

import numpy as np
import torch

from ballast.common.errors import BallastError, Unavailable
from ballast.common.ids import WorkerId
from ballast.service.logs import get_logger
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.batch import SequenceId
from services.worker.engine.packing import Ints
from services.worker.engine.partial_attention import Partial, PartialAttention, Span
from services.worker.engine.spread_attention import Elsewhere
from services.worker.links.link import Link
from services.worker.links.pace import StagePace
from services.worker.links.receiving import Message
from services.worker.links.traffic import TrafficClass
from services.worker.memory.kv_cache import KvCache
from services.worker.pipeline.wire import Topic

_ANSWER_TIMEOUT_S = 10.0
_ROSTER_TIMEOUT_S = 5.0
_MAX_QUESTIONS = 256
_MAX_PREPARED = 16  # sets of rows that are asked for together: a microbatch each, and some prompts' chunks


@dataclass(frozen=True, slots=True, eq=False)
class _Lent:
    """KV of layers given up, for as long as somebody may ask for it."""

    blocks: Ints
    token_count: int


class RemoteAttention:
    """`engine.spread_attention.Holders` of one worker, and what answers the others."""

    def __init__(self, kv: KvCache, link: Callable[[WorkerId], Link | None], pace: StagePace) -> None:
        """`pace` is told that questions are under way."""
        self._kv = kv
        self._link = link
        self._pace = pace
        self._elsewhere: dict[SequenceId, tuple[Elsewhere, ...]] = {}  # engine thread only
        self._numbers = count(1)
        self._lock = Lock()
        self._asked: dict[int, tuple[str, Future[torch.Tensor]]] = {}
        self._changed = Condition()
        self._lent: dict[tuple[SequenceId, int], _Lent] = {}  # by sequence and layer
        self._answering = False
        self._prepared: dict[tuple[tuple[_Lent, ...], tuple[int, ...]], PartialAttention] = {}  # same for all layers
        self._questions: queue.Queue[tuple[Link, Message] | None] = queue.Queue(_MAX_QUESTIONS)
        self._thread: Thread | None = None
        self.questions_total = 0

    # ------------------------------------------------------------ this member lacks KV; engine thread

    def await_kv(self, sequence_id: SequenceId, holder: WorkerId, token_count: int, layers: range) -> None:
        self._pace.attended_at_s = time.monotonic()  # soon: the first question is not to find a large chunk before it
        elsewhere = Elsewhere(holder, token_count, layers.start, layers.stop)
        self._elsewhere[sequence_id] = (*self._elsewhere.get(sequence_id, ()), elsewhere)

    def has_come(self, sequence_id: SequenceId, holder: WorkerId) -> bool:
        """All of what that holder had. False: nobody was going to ask for it."""
        before = self._elsewhere.get(sequence_id, ())
        left = tuple(e for e in before if e.holder != holder)
        if left:
            self._elsewhere[sequence_id] = left
        else:
            self._elsewhere.pop(sequence_id, None)
        return len(left) < len(before)

    def of(self, sequence_id: SequenceId) -> Sequence[Elsewhere]:
        return self._elsewhere.get(sequence_id, ())

    def ask(
        self, holder: str, layer: int, rows: Sequence[tuple[SequenceId, int]], q_RNH: torch.Tensor
    ) -> Callable[[], Partial]:
        link = self._link(WorkerId(holder))
        if link is None:
            raise Unavailable(holder, "it has KV that is asked for, and there is no link to it")
        number, answer = next(self._numbers), Future[torch.Tensor]()
        with self._lock:
            self._asked[number] = (holder, answer)
        body = pb.Attend(layer=layer, sequence_ids=[i for i, _ in rows], row_counts=[n for _, n in rows])
        meta, tensor = body.SerializeToString(), q_RNH.flatten(1).contiguous()
        self._pace.attended_at_s = time.monotonic()
        try:
            link.send(TrafficClass.ACTIVATION, Topic.ATTEND, meta=meta, tensor=tensor, stream=number, timeout_s=1.0)
        except BallastError:
            with self._lock:
                self._asked.pop(number, None)
            raise
        self.questions_total += 1
        shape = tuple(q_RNH.shape)
        return lambda: self._await(link, number, answer, shape)

    def _await(self, link: Link, number: int, answer: Future[torch.Tensor], shape: tuple[int, ...]) -> Partial:
        try:
            both = answer.result(_ANSWER_TIMEOUT_S)
        except FutureTimeout:
            link.give_up("it does not answer for KV that it holds")
            raise Unavailable(link.peer_id, "no answer for KV that it holds") from None
        finally:
            with self._lock:
                self._asked.pop(number, None)
        rows, heads, head_dim = shape
        return Partial(both[:, : heads * head_dim].view(rows, heads, head_dim), both[:, heads * head_dim :])

    # ------------------------------------------------------------ others lack what is here; engine thread

    def lend(self, sequence_id: SequenceId, layers: range, table: Sequence[int], token_count: int) -> None:
        self._pace.attended_at_s = time.monotonic()
        lent = _Lent(np.array(table, np.int64), token_count)
        with self._changed:
            for layer in layers:
                self._lent[sequence_id, layer] = lent
            if self._thread is None:
                self._thread = Thread(target=self._run, name="remote-attention", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take_back(self, sequence_id: SequenceId) -> None:
        with self._changed:
            for key in [key for key in self._lent if key[0] == sequence_id]:
                del self._lent[key]
            self._prepared.clear()

    def abandon(self) -> None:
        """The group is no more: nobody asks, and nobody is answered."""
        self._elsewhere.clear()
        with self._changed:
            self._lent.clear()
            self._prepared.clear()
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Nothing here is being read."""
        with self._changed:
            return not self._answering

    def close(self) -> None:
        thread = self._thread
        if thread is not None:
            self._questions.put(None, timeout=_ANSWER_TIMEOUT_S)
            thread.join(_ANSWER_TIMEOUT_S)

    # ------------------------------------------------------------ links' threads

    def asked(self, link: Link, message: Message) -> None:
        self._pace.attended_at_s = time.monotonic()
        self._questions.put_nowait((link, message))  # full: more than the peers can ask, which breaks the link

    def answered(self, link: Link, message: Message) -> None:
        with self._lock:  # an answer and the end of its link may come at once, on two threads
            _, answer = self._asked.get(message.stream, ("", None))
            if answer is None or answer.done():
                return
            if message.tensor is None:
                answer.set_exception(Unavailable(link.peer_id, "it does not hold KV that it is asked for"))
            else:
                answer.set_result(message.tensor)

    def link_ended(self, peer: str, why: str) -> None:
        with self._lock:
            for holder, answer in self._asked.values():
                if holder == peer and not answer.done():
                    answer.set_exception(Unavailable(peer, why))

    # ------------------------------------------------------------ the thread that answers

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            link, message = question
            try:
                answer = self._answer(message)
                link.send(TrafficClass.ACTIVATION, Topic.ATTENDED, tensor=answer, stream=message.stream, timeout_s=1.0)
            except BallastError as error:  # a link that ends is told of anyway
                get_logger().warning("a question for KV was not answered", by=link.peer_id, why=str(error))
            except Exception as error:  # noqa: BLE001 a bug or a broken question ends that link, and nobody else's answers
                get_logger().exception("a question for KV cannot be answered", by=link.peer_id)
                link.give_up(f"a question for KV cannot be answered: {type(error).__name__}: {error}")

    def _answer(self, message: Message) -> torch.Tensor | None:
        asked = pb.Attend.FromString(message.meta)
        lent = self._find([(sequence_id, asked.layer) for sequence_id in asked.sequence_ids])
        if lent is None or message.tensor is None:
            return None
        try:
            cache = self._kv.layer(asked.layer)
            q_RNH = message.tensor.view(message.tensor.shape[0], -1, self._kv.shape.head_dim)
            with torch.inference_mode():
                found = self._prepare(tuple(lent), tuple(asked.row_counts), cache.device).run(cache, q_RNH)
                return torch.cat([found.out_RNH.flatten(1), found.lse_RN], 1)
        finally:
            with self._changed:
                self._answering = False

    def _prepare(self, lent: tuple[_Lent, ...], row_counts: tuple[int, ...], device: torch.device) -> PartialAttention:
        """What is asked for in one layer is asked for in the others and, while they last, in the next steps too."""
        with self._changed:
            if (known := self._prepared.get((lent, row_counts))) is not None:
                return known
        spans = [Span(rows, 0, one.token_count, False, one.blocks) for rows, one in zip(row_counts, lent, strict=True)]
        made = PartialAttention(spans, self._kv.shape.block_tokens, device)
        with self._changed:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            self._prepared[lent, row_counts] = made
        return made

    def _find(self, keys: Sequence[tuple[SequenceId, int]]) -> list[_Lent] | None:
        """None: it is not here. From here on it is being read."""
        deadline_s = time.monotonic() + _ROSTER_TIMEOUT_S
        with self._changed:
            while not all(key in self._lent for key in keys):
                if not self._changed.wait(max(deadline_s - time.monotonic(), 0)):
                    return None
            self._answering = True
            return [self._lent[key] for key in keys]
