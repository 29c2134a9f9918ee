"""A cluster of worker cores without threads or network: groups merge and split, and every stage has its own cache.

Every worker has its own block book and its own cache, in which a block holds token ids for each layer. A stage runs a
batch for its layers only. The output token is a hash of what all layers read back through all block tables, so a layer
whose KV was not sent, arrived in the wrong block or was overwritten yields a wrong token.

Stages run one at a time in any order, messages wait until they are delivered, and each worker's clock has a different
offset.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count

from ballast.common.ids import WorkerId
from services.worker.core.batch import PREEMPTED, Batch, StepResult, TokenLogprobs
from services.worker.core.blocks import Table, blocks_for
from services.worker.core.events import (
    Aborted,
    AdmissionLimited,
    Adopted,
    BatchWanted,
    CapacityChanged,
    Command,
    Emit,
    Ending,
    Event,
    Execute,
    HandedOver,
    HandOver,
    KvArrived,
    KvLost,
    KvTravels,
    Removed,
    RoleChanged,
    SequenceKey,
    StepDone,
    StepFailed,
    StepPreempted,
    StreamClosed,
    StreamOpened,
    Submitted,
    Tick,
)
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.limits import WorkerLimits
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.swapping import block_copies
from services.worker.policy.harvest import Harvest
from services.worker.policy.microbatching import Microbatching, by_token_count
from services.worker.policy.placement import MemberView, PlacementView, place
from tests.support.pipeline_parts import LAYERS, Group, Request, Worker
from tests.support.worker_core import MEMORY, next_token, piece


class Cluster:
    def __init__(
        self,
        limits: WorkerLimits,
        memory_units: Sequence[int],
        microbatching: Microbatching = by_token_count,
        harvest: Harvest | None = None,
    ) -> None:
        self.limits = limits
        self.workers = [
            Worker(i, limits, units, microbatching, harvest or Harvest()) for i, units in enumerate(memory_units, 1)
        ]
        self.groups = [Group([worker]) for worker in self.workers]
        self.at_s = 0.0
        self.requests: list[Request] = []
        self.by_key: dict[tuple[WorkerId, SequenceKey], Request] = {}
        self.where: dict[int, dict[int, Worker]] = {}  # sequence id -> layer -> holder of its KV in transit
        self.kv_tokens: dict[int, int] = {}  # sequence id -> tokens of its KV in transit
        self.told: list[Command] = []
        self.resumed_from_kv = 0
        self.overlapped = 0  # chunks dispatched while the previous one was in flight
        self.swapped_in_pipelines = 0
        self.preempted = 0  # batches preempted within a step
        self._stream_ids, self._handles = count(1), count(1)

    # ---------------------------------------------------------------- workers

    def feed(self, worker: Worker, event: Event) -> list[Command]:
        event = replace(event, at_s=self.at_s + worker.clock_ahead_s)
        commands = worker.core.handle(event)
        worker.core.check()
        for command in commands:
            self.told.append(command)
            match command:
                case Emit():
                    assert command.stream_id == worker.stream_id, "output for a closed stream"
                    worker.letters.append(command)
                case Execute():
                    self._depart(worker, command)
                case Removed():
                    worker.copies[command.batch.step_id] = command.copies
                    worker.queue.append((command.batch, (), {}))
                    self._drop_texts(worker, command.batch)
                case _:
                    pass
        return commands

    def _depart(self, leader: Worker, execute: Execute) -> None:
        batch = execute.batch
        group = self.group_of(leader)
        flying = {s.sequence_id: s for b in group.batches.values() for s in b.slices}
        for part in batch.slices:
            if (before := flying.get(part.sequence_id)) is not None:
                assert not before.samples, "the token is not known yet"
                assert part.first_position == before.first_position + len(before.token_ids)
                self.overlapped += 1
        assert len(group.batches) <= len(group.members)  # plus this batch
        assert sum(len(s.token_ids) for s in batch.slices) <= self.limits.max_batch_tokens
        group.batches[batch.step_id] = batch
        self._drop_texts(leader, batch)
        for new, wanted in zip(batch.added, execute.text_wanted, strict=True):
            if wanted:
                leader.detokenizers[new.sequence_id] = [*new.prompt_token_ids, *new.output_token_ids]
        leader.copies[batch.step_id] = execute.copies
        leader.queue.append((batch, execute.block_tables, {}))

    def _drop_texts(self, leader: Worker, batch: Batch) -> None:
        for sequence_id in batch.removed:
            leader.detokenizers.pop(sequence_id, None)

    def group_of(self, worker: Worker) -> Group:
        return next(group for group in self.groups if worker in group.members)

    def run_stage(self, worker: Worker, *, preempted: bool = False) -> None:
        """Runs the worker's next queued batch; `preempted`: only its first layers, if it has safepoints."""
        group = self.group_of(worker)
        batch, tables, read = worker.queue.popleft()
        if worker is not group.leader:
            tables = worker.book.apply(batch)
            worker.book.check()
        assert tables is not None
        copies = worker.copies.pop(batch.step_id, ()) if worker is group.leader else block_copies(batch, worker.book)
        self.swapped_in_pipelines += len(copies) if len(group.members) > 1 else 0
        if batch.step_id % 2:  # copies may be made at any time during the step
            worker.copy(copies, self.limits.block_tokens)
        for sequence_id in batch.removed:
            worker.known.pop(sequence_id, None)
        for new in batch.added:
            assert new.sequence_id not in worker.known
            worker.known[new.sequence_id] = new
        preempted = preempted and batch.safepoint_layers > 0 and bool(batch.slices)
        for part, table in zip(batch.slices, tables, strict=True):
            assert part.sequence_id in worker.known
            for layer in worker.layers[: batch.safepoint_layers] if preempted else worker.layers:
                self._write(worker, layer, table, part.first_position, part.token_ids)
        if preempted:
            self.preempted += 1
            batch = replace(batch, slices=(), failure=PREEMPTED)
            tables = ()
        for part, table in zip(batch.slices, tables, strict=True):
            for layer in worker.layers:
                tokens = self._read(worker, layer, table, part.first_position + len(part.token_ids))
                assert read.setdefault(part.sequence_id, tokens) == tokens, "layers disagree"
        if batch.step_id % 2 == 0:
            worker.copy(copies, self.limits.block_tokens)
        stage = group.members.index(worker)
        if stage + 1 < len(group.members):
            group.members[stage + 1].queue.append((batch, None, read))
        elif batch.failure:
            group.results.append(batch.step_id)
        elif batch.slices:
            group.results.append(self._sample(worker, batch, read))

    def _sample(self, worker: Worker, batch: Batch, read: dict[int, list[int]]) -> StepResult:
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for part in batch.slices:
            if part.samples:
                token_ids.append(next_token(read[part.sequence_id]))
                wanted = worker.known[part.sequence_id].sampling.logprobs is not None
                logprobs.append(TokenLogprobs(token_ids[-1], -1.0, ()) if wanted else None)
        return StepResult(batch.step_id, tuple(token_ids), tuple(logprobs), 0.001)

    def _write(self, worker: Worker, layer: int, table: Table, first: int, token_ids: Sequence[int]) -> None:
        for position, token_id in enumerate(token_ids, first):
            block, place_in_it = divmod(position, self.limits.block_tokens)
            worker.cache[layer, table[block], place_in_it] = token_id

    def _read(self, worker: Worker, layer: int, table: Table, token_count: int) -> list[int]:
        size = self.limits.block_tokens
        return [worker.cache[layer, table[p // size], p % size] for p in range(token_count)]

    def want_batch(self, group: Group) -> bool:
        """Returns whether a batch was formed."""
        if not group.leader.core.has_work:
            return False
        idle = not group.batches
        commands = self.feed(group.leader, BatchWanted(0.0))
        formed = any(isinstance(c, Execute) or (isinstance(c, Removed) and c.copies) for c in commands)
        assert formed or not idle or not group.leader.core.has_work, "no batch although there is work"
        return formed

    def finish_step(self, group: Group, *, fail: bool = False) -> None:
        """The leader receives the result of its oldest finished batch."""
        result = group.results.popleft()
        if isinstance(result, int):
            del group.batches[result]
            self.feed(group.leader, StepPreempted(0.0, result))
            return
        batch = group.batches.pop(result.step_id)
        if fail:
            self.feed(group.leader, StepFailed(0.0, result.step_id, "out of luck"))
            return
        sampling = [part.sequence_id for part in batch.slices if part.samples]
        texts: list[str] = []
        for sequence_id, token_id in zip(sampling, result.token_ids, strict=True):
            detokenizer = group.leader.detokenizers.get(sequence_id)
            if detokenizer is not None:
                assert next_token(detokenizer) == token_id, "the detokeniser saw different tokens"
                detokenizer.append(token_id)
            texts.append("" if detokenizer is None else piece(token_id))
        self.feed(group.leader, StepDone(0.0, result, tuple(texts)))

    def drain_pipeline(self, group: Group) -> None:
        for worker in group.members:
            while worker.queue:
                self.run_stage(worker)
        while group.results:
            self.finish_step(group)
        for worker in group.members:  # removals that follow from the last results
            while worker.queue:
                self.run_stage(worker)
        assert not group.batches

    # ---------------------------------------------------------------- the dispatcher

    def submit(self, request: Request, worker: Worker, *, expects_handover: bool = False) -> None:
        if not worker.stream_id:
            worker.stream_id = next(self._stream_ids)
            self.feed(worker, StreamOpened(0.0, worker.stream_id))
        key = SequenceKey(worker.stream_id, next(self._handles))
        if request not in self.requests:
            self.requests.append(request)
        request.attempt += 1
        request.at, request.claim_at = (worker, key), None
        self.by_key[worker.worker_id, key] = request
        left_s = None if request.deadline_at_s is None else request.deadline_at_s - self.at_s
        arrived = set(worker.core.group_scheduler.scheduler.suspended.arrived)
        self.feed(
            worker,
            Submitted(
                at_s=0.0,
                key=key,
                request_id=request.request_id,
                attempt=request.attempt,
                prompt_token_ids=request.prompt,
                sampling=request.sampling,
                output_token_ids=tuple(request.tokens),
                output_text="".join(piece(t) for t in request.tokens),
                delivered_text_chars=len(request.text),
                priority=request.priority,
                deadline_at_s=None if left_s is None else self.at_s + worker.clock_ahead_s + left_s,
                wants_text=request.wants_text,
                expects_handover=expects_handover,
            ),
        )
        self.resumed_from_kv += len(arrived.intersection(worker.core.sequence_ids))

    def read_letter(self, worker: Worker) -> None:
        emit = worker.letters.popleft()
        tokens, logprobs = iter(emit.token_ids), iter(emit.logprobs)
        for index, handle in enumerate(emit.handles):
            request = self.by_key[worker.worker_id, SequenceKey(emit.stream_id, handle)]
            assert request.ending is None
            for _ in range(emit.token_counts[index]):
                request.tokens.append(next(tokens))
                if request.sampling.logprobs is not None:
                    request.logprobs.append(next(logprobs).token_id)
            request.text += emit.texts[index] if emit.texts else ""
            request.past.append((len(request.tokens), len(request.text)))
        assert next(tokens, None) is None
        assert next(logprobs, None) is None
        for ending in emit.endings:
            self._hear_ending(self.by_key.pop((worker.worker_id, SequenceKey(emit.stream_id, ending.handle))), ending)

    def _hear_ending(self, request: Request, ending: Ending) -> None:
        assert request.ending is None, "a second ending"
        assert request.at is not None
        request.at = None
        if ending.moved_to:
            request.claim_at = next(w for w in self.workers if w.worker_id == ending.moved_to)
        elif not ending.refused:
            request.ending = ending

    def abort(self, request: Request) -> None:
        if request.at is None:
            request.abandoned = True
        else:
            worker, key = request.at
            self.feed(worker, Aborted(0.0, key))

    def lose_stream(self, worker: Worker) -> None:
        """The connection breaks: unread output is lost, and the dispatcher will resubmit its requests."""
        self.feed(worker, StreamClosed(0.0, worker.stream_id))
        worker.letters.clear()
        worker.stream_id = 0
        for request in self.requests:
            if request.at is not None and request.at[0] is worker:
                del self.by_key[worker.worker_id, request.at[1]]
                request.at = None

    def pass_time(self, seconds: float) -> None:
        self.at_s += seconds
        for worker in self.workers:
            self.feed(worker, Tick(0.0))
            due_at_s = worker.core.next_deadline_at_s
            assert due_at_s is None or due_at_s > self.at_s + worker.clock_ahead_s

    # ---------------------------------------------------------------- KV in transit

    def _holders(self, group: Group, sequence_id: int) -> dict[int, Worker]:
        found = self.where.get(sequence_id)
        return found or {layer: worker for worker in group.members for layer in worker.layers}

    def travelling(self, group: Group) -> list[tuple[int, int]]:
        """(sequence id, layer) of KV that has not reached the worker that will use it."""
        return [
            (sequence_id, layer)
            for sequence_id in group.leader.core.group_scheduler.suspended_ids
            for layer, holder in self.where.get(sequence_id, {}).items()
            if layer not in holder.layers or holder not in group.members
        ]

    def carry(self, group: Group, sequence_id: int, layer: int) -> None:
        """The KV of one layer arrives; after the last one, the sequence resumes."""
        source = self.where[sequence_id][layer]
        target = next(w for w in group.members if layer in w.layers)
        tokens = self._read(source, layer, source.book.table(sequence_id), self.kv_tokens[sequence_id])
        self._write(target, layer, target.book.table(sequence_id), 0, tokens)
        self.where[sequence_id][layer] = target
        if not any(s == sequence_id for s, _ in self.travelling(group)):
            self._stop_travelling(group, sequence_id)
            self.resumed_from_kv += sequence_id in group.leader.core.sequence_ids
            self.feed(group.leader, KvArrived(0.0, sequence_id))
            self.tell_capacity(group)

    def lose_kv(self, group: Group, sequence_id: int) -> None:
        self._stop_travelling(group, sequence_id)
        self.feed(group.leader, KvLost(0.0, sequence_id))
        self.tell_capacity(group)

    def _stop_travelling(self, group: Group, sequence_id: int) -> None:
        self.where.pop(sequence_id, None)
        self.kv_tokens.pop(sequence_id, None)
        for worker in self.workers:
            if worker not in group.members and worker.book.release(sequence_id):
                self.tell_capacity(self.group_of(worker))

    # ---------------------------------------------------------------- groups

    def _foreign_blocks(self, group: Group, worker: Worker, adopting: Collection[int]) -> int:
        """Blocks held for KV that is being sent away, or for sequences that the leader has not adopted yet."""
        core = group.leader.core
        own = {*core.sequence_ids, *core.group_scheduler.scheduler.suspended, *adopting}
        return sum(len(worker.book.table(s)) for s in self.where if s not in own)

    def _end(self, group: Group) -> None:
        """Ends the group's work: all KV arrives, and its stages apply all pending removals."""
        self.drain_pipeline(group)
        for sequence_id, layer in self.travelling(group):
            self.carry(group, sequence_id, layer)
        self.tell_capacity(group, swap_blocks=0)
        self.drain_pipeline(group)

    def tell_capacity(
        self, group: Group, missing: int = 0, adopting: Collection[int] = (), swap_blocks: int | None = None
    ) -> None:
        """Sends the smallest stage's capacity to the leader, less `missing` blocks. `adopting`: sequences that are
        about to become the leader's. `swap_blocks`: blocks in host memory; by default the limit.
        """
        block_count = min(w.blocks_with(len(w.layers)) for w in group.members)
        free = min(w.blocks_with(len(w.layers)) - self._foreign_blocks(group, w, adopting) for w in group.members)
        swap_blocks = self.limits.swap_block_count if swap_blocks is None else swap_blocks
        lent = block_count - free + missing
        self.feed(group.leader, CapacityChanged(0.0, block_count, lent, swap_block_count=swap_blocks))

    def merge(self, groups: Sequence[Group], ends: Sequence[int]) -> Group:
        """Merges groups into one pipeline. `ends`: end of each member's layer range, without the last."""
        merged = Group([w for group in groups for w in group.members])
        new_leader = merged.leader
        for group in groups:
            self.settle_handovers(group)
            self._end(group)
        for group in groups:
            self._note_kv(group)
            if group.leader is not new_leader:
                merged.handovers += self._hand_over(group, HandOver(0.0, new_leader.worker_id)).values()
                self.feed(group.leader, RoleChanged(0.0, leads=False))
            self.drain_pipeline(group)
            self.groups.remove(group)
        self.groups.append(merged)
        self._take_layers(merged, [range(a, b) for a, b in zip((0, *ends), (*ends, LAYERS), strict=True)])
        return merged

    def split(self, group: Group) -> list[Group]:
        """Splits a group into lone members, each with a share of the sequences."""
        self.settle_handovers(group)
        self._end(group)
        self._note_kv(group)
        members = [MemberView(w.worker_id, w.blocks_with(LAYERS), self.limits.max_running_count) for w in group.members]
        placed = {
            s: w
            for s, w in place(_placements(group.leader.core.group_scheduler), members).items()
            if w != group.leader.worker_id
        }
        handed_over = self._hand_over(group, HandOver(0.0, placed))
        self.drain_pipeline(group)
        self.groups.remove(group)
        alone = [Group([worker]) for worker in group.members]
        self.groups += alone
        for one in alone:
            if snapshots := handed_over.get(one.leader.worker_id):
                one.handovers.append(snapshots)
            self._take_layers(one, [range(LAYERS)])
        return alone

    def _note_kv(self, group: Group) -> None:
        """Records where all sequences' KV is before layers move."""
        for sequence_id, token_count in group.leader.core.group_scheduler.kv_tokens.items():
            self.where[sequence_id] = self._holders(group, sequence_id)
            self.kv_tokens[sequence_id] = token_count

    def _hand_over(self, group: Group, event: HandOver) -> dict[WorkerId, tuple[SequenceSnapshot, ...]]:
        commands = self.feed(group.leader, event)
        (handed_over,) = [c for c in commands if isinstance(c, HandedOver)]
        return dict(handed_over.snapshots)

    def _take_layers(self, group: Group, ranges: Sequence[range]) -> None:
        """Starts the new roles. Engines forget their sequences; block books keep the tables."""
        for worker, layers in zip(group.members, ranges, strict=True):
            worker.layers = layers
            worker.known.clear()
            worker.detokenizers.clear()
            if worker is not group.leader:  # the leader forgets them when its role changes
                worker.book.forget_numbers()
            if (more := worker.blocks_with(len(layers)) - worker.book.block_count) > 0:
                worker.book.grow(more)
        leader = group.leader
        had = leader.core.group_scheduler.kv_tokens
        self.feed(leader, RoleChanged(0.0, leads=True, stage_count=len(group.members)))
        self.tell_capacity(group)  # reports capacity before the sequences hold blocks in the new group
        own = {s for s in leader.core.group_scheduler.kv_tokens if s in self.where}
        for preempted in sorted(had.keys() - own):
            self._stop_travelling(group, preempted)
        self.feed(leader, KvTravels(0.0, frozenset(own)))
        lost = [s for s in sorted(own) if not self._hold(group, s)]
        for sequence_id in lost:
            self.lose_kv(group, sequence_id)
        self.tell_capacity(group)
        self._arrive_unmoved(group, own)

    def _hold(self, group: Group, sequence_id: int) -> bool:
        """Reserves blocks on all stages for the arriving KV; returns False if one has too few."""
        token_count = self.kv_tokens[sequence_id]
        needed = blocks_for(token_count, self.limits.block_tokens)
        if any(len(w.book.table(sequence_id)) + w.book.free_count < needed for w in group.members):
            return False
        for worker in group.members:
            worker.book.hold(sequence_id, token_count)
        return True

    def _arrive_unmoved(self, group: Group, sequence_ids: set[int]) -> None:
        travelling = {s for s, _ in self.travelling(group)}
        for sequence_id in sorted(sequence_ids - travelling):
            if sequence_id in group.leader.core.group_scheduler.suspended_ids:
                self._stop_travelling(group, sequence_id)
                self.feed(group.leader, KvArrived(0.0, sequence_id))

    def deliver_handover(self, group: Group) -> None:
        """Delivers a handover between batches, since a stage must not free blocks that a batch in flight uses."""
        self.drain_pipeline(group)
        self.tell_capacity(group)
        self.drain_pipeline(group)
        snapshots = group.handovers.pop(0)
        with_kv = {s.sequence_id for s in snapshots if s.sequence_id in self.where}
        lost = {s for s in sorted(with_kv) if not self._hold(group, s)}
        for sequence_id in sorted(lost):
            self._stop_travelling(group, sequence_id)
        self.tell_capacity(group, adopting=with_kv)
        self.feed(
            group.leader,
            Adopted(0.0, snapshots, frozenset(with_kv - lost), frozenset(lost), last=not group.handovers),
        )
        self.tell_capacity(group)
        self._arrive_unmoved(group, with_kv - lost)

    def settle_handovers(self, group: Group) -> None:
        while group.handovers:
            self.deliver_handover(group)

    def shrink(self, worker: Worker) -> bool:
        """Shrinks the book to the room that the worker's layers leave, if all used blocks fit."""
        group = self.group_of(worker)
        target = worker.blocks_with(len(worker.layers))
        self.drain_pipeline(group)
        self.tell_capacity(group)
        self.drain_pipeline(group)
        if worker.book.block_count <= target or worker.book.used_count > target:
            return False
        size = self.limits.block_tokens
        moves = worker.book.compaction_plan(target)
        for source, to in moves:
            for layer in range(LAYERS):
                for place_in_it in range(size):
                    token_id = worker.cache.pop((layer, source, place_in_it), None)
                    if token_id is not None:
                        worker.cache[layer, to, place_in_it] = token_id
        worker.book.compacted(moves)
        worker.book.shrink(target)
        worker.book.check()
        assert all(block < target for table in map(worker.book.table, worker.book.sequence_ids) for block in table)
        return True

    # ---------------------------------------------------------------- the end

    def run_to_end(self, max_rounds: int = 1_000) -> None:
        """Finishes all work without further disturbances."""
        for group in self.groups:
            self.feed(group.leader, AdmissionLimited(0.0, None))
            self.tell_capacity(group)
        for _ in range(max_rounds):
            if not self._round():
                break
        else:
            raise AssertionError(f"work left after {max_rounds} rounds")
        self.pass_time(self.limits.handover_timeout_s + 1.0)
        for group in self.groups:
            self.drain_pipeline(group)
            self.tell_capacity(group)

    def _round(self) -> bool:
        busy = followed = False
        for group in list(self.groups):
            self.settle_handovers(group)
            for sequence_id, layer in self.travelling(group):
                self.carry(group, sequence_id, layer)
                busy = True
            for sequence_id in group.leader.core.group_scheduler.suspended_ids:
                self.lose_kv(group, sequence_id)
            while self.want_batch(group):
                busy = True
            busy = busy or bool(group.batches)
            self.drain_pipeline(group)
        for worker in self.workers:
            while worker.letters:
                self.read_letter(worker)
        for request in self.requests:
            if request.is_open and request.at is None:
                self.follow(request, self.groups[0].leader)
                followed = True
        if busy:
            return True
        if not any(request.is_open for request in self.requests):
            return False
        self.pass_time(0.1 if followed else 1.0)  # for retries of refused requests, or for handovers that time out
        return True

    def follow(self, request: Request, otherwise: Worker) -> None:
        """The dispatcher submits the request where it has moved to, or to `otherwise`."""
        if request.claim_at is not None:
            self.submit(request, request.claim_at, expects_handover=True)
        else:
            self.submit(request, otherwise)

    # ---------------------------------------------------------------- invariants

    def assert_empty(self) -> None:
        """Checks that no worker holds anything and that every request has ended or was abandoned."""
        for request in self.requests:
            assert request.ending is not None or request.abandoned
        assert not self.where
        for worker in self.workers:
            assert worker.book.used_count == len(worker.book.numbers), f"{worker.worker_id}: {worker.book.sequence_ids}"
            assert not worker.book.sequence_ids
            assert worker.core.sequence_ids == ()
            assert worker.core.group_scheduler.suspended_ids == ()
            assert worker.core.kept_count == 0
            load = worker.core.load(0.0, MEMORY)
            assert (load.used_block_count, load.running_count, load.waiting_count) == (0, 0, 0)


def _placements(group_scheduler: GroupScheduler) -> list[PlacementView]:
    """All waiting, running and suspended sequences."""
    scheduler = group_scheduler.scheduler
    running = (*scheduler.running, *scheduler.suspended.values())
    return [
        *(PlacementView(s.sequence_id, s.reserved_block_count, True) for s in running),
        *(PlacementView(s.sequence_id, scheduler.need(s), False) for s in scheduler.waiting),
    ]
