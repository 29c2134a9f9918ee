"""Stages of one pipeline whose members copy KV ahead of a restore: batches reach stages at different times, sequences
lose their blocks and others get them while they are being read for somebody, answers come late.

Every token's KV is known by its sequence and position, so a block that holds something else is seen at the commit.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ballast.common.ids import WorkerId
from services.worker.core.batch import Batch, Slice
from services.worker.core.blocks import BlockBook, blocks_for
from services.worker.core.precopy import Precopy, Source, Span

BLOCK_TOKENS = 4
Token = tuple[int, int]  # sequence, position
Block = dict[int, Token]  # place in the block -> whose KV is there


@dataclass
class Stage:
    name: WorkerId
    book: BlockBook
    core: Precopy
    batches: deque[Batch] = field(default_factory=deque[Batch])  # on their way here
    own: dict[int, Block] = field(default_factory=dict[int, Block])  # block id -> KV of the layers executed here
    foreign: dict[tuple[WorkerId, int], Block] = field(default_factory=dict[tuple[WorkerId, int], Block])
    accepted: int = 0
    refused: int = 0


@dataclass
class Life:
    """A sequence as the leader has it."""

    sequence_id: int
    tokens: int  # of the sequence, KV or not
    computed: int = 0
    share_of: WorkerId | None = None


class Pipeline:
    """The leader forms batches by counts; what is sent to a stage or back keeps its order, and takes its time."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        names = [WorkerId(f"w{i}") for i in range(rng.choice([2, 2, 3, 4]))]
        self.block_count = rng.choice([12, 24, 40])
        max_blocks = rng.choice([1, 3, 8])
        self.stages = {
            name: Stage(
                name,
                BlockBook(self.block_count, BLOCK_TOKENS),
                Precopy(tuple(Source(n, i, i + 1) for i, n in enumerate(names) if n != name), BLOCK_TOKENS, max_blocks),
            )
            for name in names
        }
        self.running: dict[int, Life] = {}
        self.waiting: list[Life] = []
        self.removed: list[int] = []
        self.step_id = 0
        self.next_id = 1
        self.links: dict[tuple[WorkerId, WorkerId], deque[Callable[[], None]]] = {}
        self.gone_while_read = 0  # reads that found another sequence's KV

    # ------------------------------------------------------------ the leader

    def form(self) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            self.waiting.append(Life(self.next_id, rng.randint(1, 40)))
            self.next_id += 1
        for life in list(self.running.values()):
            if rng.random() < 0.03:
                self._remove(life)
            elif rng.random() < 0.04:
                self._remove(life)
                life.computed = 0
                self.waiting.insert(0, life)
        slices: list[Slice] = []
        for life in self._admitted():
            count = 1 if life.computed == life.tokens else min(rng.choice([3, 8, 16]), life.tokens - life.computed)
            if life.computed == life.tokens:
                life.tokens += 1
            slices.append(Slice(life.sequence_id, life.computed, (0,) * count, True))
            life.computed += count
        self.step_id += 1
        batch = Batch(self.step_id, tuple(self.removed), (), tuple(slices))
        self.removed = []
        for stage in self.stages.values():
            stage.batches.append(batch)

    def _remove(self, life: Life) -> None:
        del self.running[life.sequence_id]
        self.removed.append(life.sequence_id)

    def _admitted(self) -> list[Life]:
        """Those for whom there is room, the first come first; the others give way."""
        left, kept = self.block_count, list[Life]()
        for life in [*self.running.values(), *self.waiting]:
            need = blocks_for(life.tokens + 1, BLOCK_TOKENS)
            if need <= left:
                left -= need
                kept.append(life)
        for life in [one for one in self.running.values() if one not in kept]:
            self._remove(life)
            life.computed = 0
            self.waiting.append(life)
        self.waiting = [life for life in self.waiting if life not in kept]
        gone = set(self.removed)
        self.running = {life.sequence_id: life for life in kept}
        return [life for life in kept if life.sequence_id not in gone or not life.computed]

    def share_out(self) -> None:
        told: dict[WorkerId, list[int]] = {name: [] for name in self.stages}
        for life in self.running.values():
            if life.share_of is None:
                life.share_of = self.rng.choice(sorted(self.stages))
                told[life.share_of].append(life.sequence_id)
        leader = min(self.stages)
        for name, ids in told.items():
            self.send(leader, name, lambda n=name, i=ids: self.stages[n].core.share(i))

    # ------------------------------------------------------------ stages and links

    def run_batch(self, stage: Stage) -> None:
        if not stage.batches or (stage.name != min(self.stages) and self._ahead_of_its_stage(stage)):
            return
        batch = stage.batches.popleft()
        tables = stage.book.apply(batch)
        stage.core.begins(batch)
        for part, table in zip(batch.slices, tables, strict=True):
            for position in range(part.first_position, part.first_position + len(part.token_ids)):
                block = stage.own.setdefault(table[position // BLOCK_TOKENS], {})
                block[position % BLOCK_TOKENS] = part.sequence_id, position
        stage.core.ran(batch)
        stage.core.check()

    def _ahead_of_its_stage(self, stage: Stage) -> bool:
        """A stage gets a batch from the one before it."""
        names = sorted(self.stages)
        before = self.stages[names[names.index(stage.name) - 1]]
        return len(before.batches) >= len(stage.batches)

    def send(self, source: WorkerId, to: WorkerId, act: Callable[[], None]) -> None:
        self.links.setdefault((source, to), deque()).append(act)

    def deliver(self) -> None:
        busy = sorted(key for key, queue in self.links.items() if queue)
        if busy:
            self.links[self.rng.choice(busy)].popleft()()

    def ask(self, stage: Stage) -> None:
        for source, span in stage.core.wants():
            self.send(stage.name, source, lambda s=source, w=span: self._answer(self.stages[s], stage, w))

    def _answer(self, source: Stage, to: Stage, wanted: Span) -> None:
        """The table is looked up now, its blocks are read one by one while other things happen."""
        span, step_id = source.core.offer(wanted)
        ids = source.book.table(span.sequence_id)[span.first_block : span.last_block]
        assert len(ids) == span.last_block - span.first_block
        came: list[Block] = []
        for i, block_id in enumerate(ids):
            index = span.first_block + i
            self.send(source.name, to.name, lambda b=block_id, x=index: came.append(self._read(source, b, span, x)))
        self.send(source.name, to.name, lambda: self._land(source, to, span, step_id, came))

    def _read(self, source: Stage, block_id: int, span: Span, index: int) -> Block:
        block = dict(source.own[block_id])
        self.gone_while_read += block != whole_block(span.sequence_id, index)
        return block

    def _land(self, source: Stage, to: Stage, span: Span, step_id: int, came: list[Block]) -> None:
        if self.rng.random() < 0.02:
            to.core.failed(source.name, span.sequence_id)
        elif to.core.landed(source.name, span, step_id):
            to.accepted += 1
            table = to.book.table(span.sequence_id)[span.first_block : span.last_block]
            for block_id, block in zip(table, came, strict=True):
                to.foreign[source.name, block_id] = block
        else:
            to.refused += 1
        to.core.check()

    # ------------------------------------------------------------ the commit

    def commit(self) -> None:
        """Every batch comes by; what is still on its way over links does not count any more."""
        names = sorted(self.stages)
        for name in names:
            while self.stages[name].batches:
                self.run_batch(self.stages[name])
            self.stages[name].core.end()
        for _ in range(200):
            self.deliver()

    def judge(self) -> int:
        """Returns how many blocks were copied. Each holds what its sequence has there."""
        copied = 0
        for stage in self.stages.values():
            for life in self.running.values():
                for source in self.stages:
                    blocks = stage.core.copied_blocks(life.sequence_id, source)
                    table = stage.book.table(life.sequence_id)
                    assert blocks * BLOCK_TOKENS <= life.computed
                    for index in range(blocks):
                        found = stage.foreign[source, table[index]]
                        assert found == whole_block(life.sequence_id, index), (stage.name, source, life, index, found)
                    copied += blocks
        return copied


def whole_block(sequence_id: int, index: int) -> Block:
    return {i: (sequence_id, index * BLOCK_TOKENS + i) for i in range(BLOCK_TOKENS)}


def story(seed: int) -> tuple[Pipeline, int]:
    """Batches, questions and answers in any order; then the commit. Returns also how many blocks were copied."""
    pipeline = Pipeline(seed)
    rng, stages = pipeline.rng, list(pipeline.stages.values())
    for _ in range(rng.randint(50, 600)):
        what = rng.random()
        if what < 0.15 and max(len(stage.batches) for stage in stages) < len(stages):
            pipeline.form()
        elif what < 0.45:
            pipeline.run_batch(rng.choice(stages))
        elif what < 0.5:
            pipeline.share_out()
        elif what < 0.6:
            pipeline.ask(rng.choice(stages))
        else:
            pipeline.deliver()
    pipeline.commit()
    return pipeline, pipeline.judge()
