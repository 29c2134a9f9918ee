"""Random histories of a worker's core with common prefixes, drawn from a seed: a lone worker, or with follower stages.

A stage has its own block book and cache, with more blocks at other numbers. Its batches arrive late, and it moves
blocks at random. A block in use twice, a table in the wrong order or a number with the wrong tokens yields a wrong
token.
"""

import random
from collections import Counter

from ballast.common.sampling import PriorityClass
from services.worker.core.batch import IN_FLIGHT, Batch, BlockNumber, StepResult
from services.worker.core.blocks import BlockBook
from services.worker.core.events import Aborted, CapacityChanged, Command, Event, Execute, Removed, SequenceKey
from services.worker.core.limits import WorkerLimits
from services.worker.core.prefixes import PrefixIndex
from services.worker.core.swapping import block_copies
from tests.support.worker_core import VOCAB_SIZE, Driver, FakeEngine, Undisturbed, greedy, limits

_LONGEST = 64
_SALTS = (b"", b"", b"", b"other")


class Stage:
    """A follower of the pipeline."""

    def __init__(self, leader_blocks: int, block_tokens: int, rng: random.Random) -> None:
        self._block_tokens = block_tokens
        self.book = BlockBook(leader_blocks + rng.randrange(9), block_tokens, first_block=rng.randrange(50))
        self.engine = FakeEngine(block_tokens)
        self.late: list[tuple[Batch, tuple[bool, ...], list[int]]] = []  # with the leader's output
        self.moved_blocks = 0

    def run_one(self) -> None:
        batch, text_wanted, token_ids = self.late.pop(0)
        tables = self.book.apply(batch)
        result, _ = self.engine.run(Execute(batch, tables, text_wanted, block_copies(batch, self.book)))
        assert list(result.token_ids) == token_ids
        self.book.check()

    def compact(self) -> None:
        moves = self.book.compaction_plan(self.book.used_count)
        self.engine.move(moves)
        self.book.compacted(moves)
        self.book.check()
        self.moved_blocks += len(moves)


class World(Driver):
    """A leader, and the stages that follow it."""

    def __init__(self, bounds: WorkerLimits, block_count: int, rng: random.Random, stage_count: int) -> None:
        super().__init__(bounds, block_count)
        self.rng = rng
        self.stages = [Stage(block_count, bounds.block_tokens, rng) for _ in range(stage_count)]

    @property
    def index(self) -> PrefixIndex:
        return self.core.group_scheduler.scheduler.prefixes

    def feed(self, event: Event) -> list[Command]:
        commands = super().feed(event)
        for command in commands:
            if isinstance(command, Removed):
                for stage in self.stages:
                    stage.late.append((command.batch, (), []))
        return commands

    def finish_step(self) -> list[Command]:
        execute, run, said = self.pending, self.engine.run, list[int]()
        assert execute is not None
        for stage in self.stages:
            stage.late.append((execute.batch, execute.text_wanted, said))

        def run_and_note(execute: Execute) -> tuple[StepResult, tuple[str, ...]]:
            result, texts = run(execute)
            said.extend(result.token_ids)
            return result, texts

        self.engine.run = run_and_note
        try:
            commands = super().finish_step()
        finally:
            self.engine.run = run
        for stage in self.stages:
            while stage.late and (len(stage.late) > 3 or self.rng.random() < 0.6):
                stage.run_one()
            if self.rng.random() < 0.05:
                stage.compact()
        return commands


class PrefixHistory:
    def __init__(self, seed: int, stage_count: int, steps: int = 120) -> None:
        rng = self.rng = random.Random(seed)
        self.steps = steps
        self.counts: Counter[str] = Counter()
        block_tokens = rng.choice([1, 2, 3, 4])
        swap = rng.choice([(0, 0), (0, 0), (12, 1), (40, 3)])
        self.least_blocks = -(-_LONGEST // block_tokens) + 1
        bounds = limits(
            block_tokens=block_tokens,
            max_model_len=_LONGEST,
            max_running_count=rng.randrange(1, 8),
            max_batch_tokens=rng.randrange(8, 40),
            max_waiting_tokens=400,
            admission_reserve_fraction=rng.choice([0.0, 0.1]),
            swap_block_count=swap[0],
            swap_blocks_per_step=swap[1],
            swaps_online=not stage_count and rng.random() < 0.5,
            prefix_caching=True,
            async_scheduling=not stage_count and seed % 4 < 3,
        )
        self.world = World(bounds, self.least_blocks + rng.randrange(1, 40), rng, stage_count)
        self.world.open(1)
        self.trunks = [self._tokens(rng.randrange(4, 30)) for _ in range(3)]
        self.asked: dict[SequenceKey, tuple[tuple[int, ...], Undisturbed]] = {}
        self.said: list[tuple[int, ...]] = []  # prompts with their answers, for later prompts to extend

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(VOCAB_SIZE) for _ in range(count))

    def _prompt(self) -> tuple[int, ...]:
        """Part of a common prefix, or of an earlier prompt and its answer (a next turn, or a repeated question), plus
        new tokens.
        """
        rng = self.rng
        start = rng.choice(self.said if self.said and rng.random() < 0.4 else self.trunks)
        start = start[: rng.choice([len(start), rng.randrange(1, len(start) + 1)])]
        return (*start, *self._tokens(rng.choice([0, 0, 1, 3, 6])))[:50]

    def play(self) -> "PrefixHistory":
        world = self.world
        for _ in range(self.steps):
            self._act()
            self._judge()
        world.run_to_end()
        self._judge()
        self._end()
        return self

    def _act(self) -> None:
        rng, world, alone = self.rng, self.world, not self.world.stages
        choice = rng.random()
        if choice < 0.30:
            prompt, sampling = self._prompt(), greedy(rng.choice([1, 4, 12, 30]))
            key = world.submit(
                prompt, sampling, priority=rng.choice(list(PriorityClass)), cache_salt=rng.choice(_SALTS)
            )
            self.asked[key] = prompt, world.expected(key, prompt)
        elif choice < 0.34 and self.asked:
            key = rng.choice(sorted(self.asked))
            if world.received[key].ending is None:
                world.feed(Aborted(world.at_s, key))
        elif choice < 0.36 and world.pending is not None and alone:
            world.fail_step()
            self.counts["failed"] += 1
        elif choice < 0.39 and world.pending is None and alone:
            world.add_blocks(rng.randrange(1, 3))
        elif choice < 0.42 and world.pending is None and alone:
            self._have_less()
        elif world.pending is not None and not (world.may_want and choice < 0.85):
            world.finish_step()
        elif (execute := world.want_batch()) is not None:
            self.counts["ahead"] += any(IN_FLIGHT in part.token_ids for part in execute.batch.slices)
            group_scheduler = world.core.group_scheduler
            has_room = world.index.retained_count <= max(0, group_scheduler.free_block_count)
            assert has_room or not group_scheduler.settled, "more blocks are retained than are free"

    def _have_less(self) -> None:
        """Reduces the capacity for a moment; retained blocks must be evicted before any preemption."""
        world, group_scheduler = self.world, self.world.core.group_scheduler
        block_count = group_scheduler.book.block_count
        less = max(self.least_blocks, block_count - self.rng.randrange(1, 4))
        reserved_count = group_scheduler.reserved_block_count
        preempted = group_scheduler.scheduler.preemptions_total
        world.feed(CapacityChanged(world.at_s, less))
        if reserved_count <= less:
            assert group_scheduler.scheduler.preemptions_total == preempted
        world.feed(CapacityChanged(world.at_s, block_count))

    def _judge(self) -> None:
        for key, (prompt, expected) in self.asked.items():
            received = self.world.received[key]
            assert tuple(received.token_ids) == expected.token_ids[: len(received.token_ids)], key
            if received.ending is not None and tuple(received.token_ids) == expected.token_ids:
                whole = (*prompt, *expected.token_ids)
                if whole not in self.said:
                    self.said.append(whole)

    def _end(self) -> None:
        world, index = self.world, self.world.index
        leader: set[BlockNumber] = world.core.group_scheduler.book.numbers
        for stage in world.stages:
            while stage.late:
                stage.run_one()
            assert stage.book.numbers == leader
            assert not stage.book.sequence_ids
            self.counts["moved"] += stage.moved_blocks
        world.assert_empty()
        self.counts["hit"] += index.hit_tokens_total
        self.counts["queried"] += index.queried_tokens_total
        self.counts["preempted"] += world.core.totals.preemptions
        self.counts["from host"] += index.host_hit_tokens_total
        self.counts["swapped"] += world.core.group_scheduler.scheduler.swap.swapped_total
