"""Whatever is queued, cancelled or reordered, every byte is sent once and in order, and no transfer waits forever."""

import ctypes

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.links.pacing import BulkSchedule, Grant, Hold, Wire
from services.worker.links.pieces import Pieces
from services.worker.links.traffic import TrafficClass

CHUNK_BYTES = 8
PATIENCE_CHUNKS = 5
HOLD_S = 0.01
BULK = st.sampled_from([TrafficClass.KV, TrafficClass.CHECKPOINT, TrafficClass.PARAMETERS])


class ScheduleMachine(RuleBasedStateMachine):
    """Compares the schedule with a simpler model, which tracks all waiting transfers and how many chunks have passed
    each class over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.schedule = BulkSchedule(chunk_bytes=CHUNK_BYTES, hold_s=HOLD_S, patience_chunks=PATIENCE_CHUNKS)
        self.left: dict[int, tuple[TrafficClass, int, int]] = {}  # transfer -> (class, bytes sent, total bytes)
        self.passed_over: dict[TrafficClass, int] = {}
        self.last = 0
        self.at_s = 0.0
        self.standing_back_s = 0.0

    def waiting_classes(self) -> set[TrafficClass]:
        return {traffic for traffic, _, _ in self.left.values()}

    def note_classes(self) -> None:
        self.passed_over = {c: self.passed_over.get(c, 0) for c in self.waiting_classes()}

    @rule(traffic=BULK, total=st.integers(1, 60), rank=st.integers(0, 2))
    def add(self, traffic: TrafficClass, total: int, rank: int) -> None:
        self.last += 1
        self.schedule.add(self.last, traffic, total, rank)
        self.left[self.last] = (traffic, 0, total)
        self.note_classes()

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.left)))
        assert self.schedule.remove(transfer)
        assert not self.schedule.remove(transfer)
        del self.left[transfer]
        self.note_classes()

    @precondition(lambda self: self.left)
    @rule(data=st.data(), traffic=BULK)
    def move(self, data: st.DataObject, traffic: TrafficClass) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.left)))
        assert self.schedule.reprioritise(transfer, traffic)
        _, sent, total = self.left[transfer]
        del self.left[transfer]
        self.note_classes()
        self.left[transfer] = (traffic, sent, total)
        self.note_classes()

    @rule(urgent=st.booleans(), share=st.floats(0.01, 1.0), later_s=st.floats(0.0001, HOLD_S))
    def step(self, urgent: bool, share: float, later_s: float) -> None:
        self.at_s += later_s
        match self.schedule.next(self.at_s, urgent=urgent):
            case None:
                assert not self.left
                self.standing_back_s = 0.0
            case Hold(until_s):
                assert urgent
                assert self.at_s < until_s <= self.at_s + HOLD_S
                self.standing_back_s += later_s
                assert self.standing_back_s <= 2 * HOLD_S
            case Grant(transfer, offset, limit):
                self.standing_back_s = 0.0
                self.use(transfer, offset, limit, share)

    def use(self, transfer: int, offset: int, limit: int, share: float) -> None:
        traffic, sent, total = self.left[transfer]
        assert offset == sent, "bytes must be sent in order, each once"
        assert 0 < limit <= min(CHUNK_BYTES, total - sent)
        highest = min(self.waiting_classes())
        assert traffic is highest or self.passed_over[traffic] >= PATIENCE_CHUNKS
        size = max(1, int(limit * share))
        finished = self.schedule.sent(transfer, size)
        assert finished == (sent + size == total)
        for waiting in self.passed_over:
            self.passed_over[waiting] = 0 if waiting is traffic else self.passed_over[waiting] + (waiting > traffic)
        if finished:
            del self.left[transfer]
        else:
            self.left[transfer] = (traffic, sent + size, total)
        self.note_classes()

    @invariant()
    def books_agree(self) -> None:
        self.schedule.check()
        assert self.schedule.queued_bytes == sum(total - sent for _, sent, total in self.left.values())
        assert len(self.schedule) == len(self.left)

    @invariant()
    def no_class_starves(self) -> None:
        # Two lower classes can become due at the same time, so the second one waits for one more chunk.
        assert all(passed <= PATIENCE_CHUNKS + 2 for passed in self.passed_over.values())


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50)), min_size=1, max_size=30),
    st.integers(1, 100),
    st.lists(st.integers(0, 20), min_size=1, max_size=10),
)
def test_on_a_slow_link_an_urgent_message_waits_for_one_chunk(
    coming: list[tuple[int, int]], chunk_bytes: int, late_by: list[int]
) -> None:
    """I4 holds whenever messages arrive and however late either lane polls. Bulk data is always waiting."""
    wire = Wire(1.0)
    coming = sorted(coming)
    waiting: list[tuple[int, int, int]] = []  # (arrival, size, number of chunks begun before it)
    chunks, now_s, looks = 0, 0.0, 0
    while coming or waiting:
        while coming and coming[0][0] <= now_s:
            since, size = coming.pop(0)
            wire.urgent_waits()
            waiting.append((since, size, chunks))
        if wire.take(chunk_bytes, urgent=False, since_s=0.0, at_s=now_s) is not None:
            assert not waiting, "a bulk chunk was sent before a waiting urgent message"
            chunks += 1
        elif waiting:
            since, size, chunks_before = waiting[0]
            if wire.take(size, urgent=True, since_s=since, at_s=now_s) is not None:
                waiting.pop(0)
                assert chunks == chunks_before, "only the chunk in flight may precede an urgent message"
        looks += 1
        now_s = max(now_s, min([wire.free_at_s, *[at for at, _ in coming[:1]]])) + late_by[looks % len(late_by)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 200_000), max_size=4),
    st.lists(st.integers(0, 200_000), max_size=4),
    st.integers(4_000, 300_000),
    st.sampled_from([64 << 10, 1 << 20]),
)
def test_bytes_survive_any_cut_on_either_side(sizes: list[int], cuts: list[int], limit: int, least: int) -> None:
    """Sender and receiver may split the same bytes into different pieces."""
    total = sum(sizes)
    whole = torch.arange(total, dtype=torch.int64).to(torch.uint8)
    source = Pieces([part.clone() for part in whole.split(sizes)] if sizes else [], "source")
    cuts = [*cuts, total]
    borders = sorted(min(cut, total) for cut in cuts)
    lengths = [end - start for start, end in zip([0, *borders], borders, strict=False)]
    parts = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    target = Pieces(parts, "target")
    offset = 0
    while offset < total:
        size = source.chunk_bytes(offset, min(limit, total - offset), least)
        assert 0 < size <= limit
        lies = source.lies(offset, size)
        assert (
            b"".join(map(ctypes.string_at, *map(np.ndarray.tolist, lies)))
            == whole[offset : offset + size].numpy().tobytes()
        )
        chunk = source.view(offset, size)
        if chunk is None:
            chunk = torch.empty(size, dtype=torch.uint8)
            source.gather(offset, chunk)
        in_place = target.view(offset, size)
        if in_place is None:
            target.scatter(offset, chunk)
        else:
            in_place.copy_(chunk)
        offset += size
    assert torch.equal(torch.cat(parts), whole)
