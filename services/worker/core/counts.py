"""Counts of the blocks and tokens that a group holds and has room for, on which `core.scheduler` bases its
decisions.
"""

import bisect
import math
from collections import Counter
from collections.abc import Collection

from ballast.common.record import record
from services.worker.core.batch import BlockNumber
from services.worker.core.batch_former import BatchFormer
from services.worker.core.blocks import blocks_for
from services.worker.core.limits import WorkerLimits
from services.worker.core.line import OFFLINE_RANK, WaitingLine, order
from services.worker.core.offline import OfflineWork
from services.worker.core.prefixes import PrefixIndex
from services.worker.core.sequence import Sequence
from services.worker.core.suspended import Suspended
from services.worker.core.swapping import SwapSpace
from services.worker.policy.admission import most_prompt_tokens, reserved
from services.worker.policy.harvest import Harvest
from services.worker.policy.microbatching import Microbatching, by_token_count
from services.worker.policy.token_target import Decoders, TokenTarget


@record()
class SchedulingPolicies:
    """The replaceable policies of a scheduler."""

    microbatching: Microbatching = by_token_count  # forms the batches of a group with several stages
    target: TokenTarget | None = None  # limit of the time per output token
    harvest: Harvest = Harvest()  # limits offline work in a batch


def _rank(sequence: Sequence) -> int:
    return sequence.rank


class GroupCounts:
    def __init__(
        self,
        limits: WorkerLimits,
        block_count: int,
        policies: SchedulingPolicies | None = None,
        first_number: BlockNumber = 0,
    ) -> None:
        """Block numbers begin after `first_number`."""
        self.policies = policies = SchedulingPolicies() if policies is None else policies
        self.limits = limits
        self.block_tokens = limits.block_tokens
        self.former = BatchFormer(limits, policies.microbatching)
        self.block_count = block_count
        self.lent_block_count = 0
        self.expected_block_count = 0  # blocks reserved for sequences that are being migrated here
        self.expected_count = 0  # number of sequences that are being migrated here
        self.ceiling_block_count = block_count  # number of blocks, or a larger one that may be available again soon
        self.admission_limit: int | None = None  # no sequence is admitted while more blocks are in use; None: no limit
        self.target = policies.target  # limits admissions by the time per output token
        self.stage_count = 1
        self.reserved_block_count: int = 0
        self.running: list[Sequence] = []  # in order of service (class, arrival)
        self.suspended = Suspended(limits.block_tokens, self._reserve, lambda s: self._unreserve(s, kept=False))
        self.line = WaitingLine()
        self.preemptions_total: int = 0
        self.turned: list[Sequence] = []  # sequences admitted or preempted since the owner last cleared this list
        self._awaited_block_count = 0  # blocks about to become free; growing sequences skip a step to wait for them
        self.offline_work = OfflineWork(limits, policies.harvest)
        self.swap = SwapSpace(
            limits.swap_block_count, limits.block_tokens, limits.swap_blocks_per_step, online=limits.swaps_online
        )
        self.prefixes = PrefixIndex(limits, first_number, self.swap.prefixes)

    @property
    def free_block_count(self) -> int:
        return self.block_count - self.lent_block_count - self.expected_block_count - self.reserved_block_count

    @property
    def kept_block_count(self) -> int:
        """Free blocks that admissions must leave for the growth of running sequences."""
        limited = self._limited_block_count
        return self.block_count - limited + reserved(limited, self.limits.admission_reserve_fraction)

    @property
    def _limited_block_count(self) -> int:
        """Number of blocks up to which sequences are admitted."""
        return self.block_count if self.admission_limit is None else min(self.block_count, self.admission_limit)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of running online prompts that are in no batch yet. A prompt counts as at most one full batch, so that
        others may be admitted alongside a long one.
        """
        most = self.limits.max_batch_tokens
        return sum([min(count, most) for count in self._left_tokens if count > 1])

    @property
    def uncomputed_tokens(self) -> int:
        """Number of all tokens of running online prompts that are in no batch yet."""
        return sum([count for count in self._left_tokens if count > 1])

    @property
    def _left_tokens(self) -> list[int]:
        """Number of tokens that are in no batch yet, for each online sequence that runs or is being swapped in."""
        online = [*self.online, *self.swap.returning] if self.swap.entries else self.online
        return [
            s.token_count - (s.computed_tokens if s.computed_tokens > s.dispatched_tokens else s.dispatched_tokens)
            for s in online
            if s.rank != OFFLINE_RANK
        ]

    @property
    def online(self) -> list[Sequence]:
        """Running online sequences, in order of service."""
        running = self.running
        if not running or running[-1].rank != OFFLINE_RANK:
            return running
        return running[: bisect.bisect_left(running, OFFLINE_RANK, key=_rank)]

    @property
    def offline(self) -> list[Sequence]:
        """Offline sequences that run or are being swapped in, by arrival."""
        running, found = self.running, list[Sequence]()
        if running and running[-1].rank == OFFLINE_RANK:
            found = running[bisect.bisect_left(running, OFFLINE_RANK, key=_rank) :]
        if self.swap.entries and (back := [s for s in self.swap.returning if s.rank == OFFLINE_RANK]):
            found = sorted([*found, *back], key=order)
        return found

    @property
    def offline_block_count(self) -> int:
        """Number of blocks that only offline sequences hold. Online sequences take them on demand."""
        return self.prefixes.freed_count(self.offline)

    @property
    def wanted_by_waiting(self) -> tuple[int, int]:
        """Number of blocks that waiting online sequences need, shared ones counted once, and of tokens to compute for
        them.
        """
        return self.prefixes.wanted([(s, self.need(s)) for s in self.line.all_online])

    @property
    def busiest_caller_count(self) -> int:
        """Number of running online sequences of the caller that has the most."""
        return max(Counter([s.caller for s in self.online]).values(), default=0)

    @property
    def max_prompt_tokens(self) -> int:
        return most_prompt_tokens(self.limits.max_batch_tokens, self.stage_count)

    @property
    def max_running_count(self) -> int:
        """Maximum running sequences: `max_num_seqs` for each microbatch in flight."""
        return self.limits.max_running_count * self.stage_count

    @property
    def has_limit(self) -> bool:
        """True if the number of running sequences is limited by a target for the time per output token."""
        return self.target is not None and (self.target.limits or self._strictest_tpot_s < math.inf)

    @property
    def place_count(self) -> int:
        """Maximum number of running sequences up to which waiting ones are admitted. Sequences that already run or are
        migrated here may exceed it.
        """
        if self.target is None:
            return self.max_running_count
        target_s = self._strictest_tpot_s
        if target_s == math.inf and not self.target.limits:
            return self.max_running_count
        count = self.running_count + self.expected_count - len(self.offline)
        block_count = self.reserved_block_count + self.prefixes.shared_count + self.expected_block_count
        block_count -= sum([s.reserved_block_count for s in self.offline])
        token_count = block_count * self.block_tokens  # tokens of KV that a batch reads
        decoders = Decoders(count, token_count, self.stage_count)
        return self.target.place_count(decoders, self.max_running_count, None if target_s == math.inf else target_s)

    @property
    def _strictest_tpot_s(self) -> float:
        """Strictest target of time per output token (seconds) among the running online sequences and the next to be
        admitted; inf: none.
        """
        head = self.line.online
        targets = [s.targets.tpot_s for s in self.online]
        return min(targets if head is None else [*targets, head.targets.tpot_s], default=math.inf)

    @property
    def max_in_flight_count(self) -> int:
        """Maximum number of batches in flight."""
        if self.stage_count == 1:
            return 2 if self.limits.async_scheduling else 1
        ahead = self.line.count > 0
        return self.stage_count + self.former.ahead_count if ahead else self.stage_count

    @property
    def ceiling_tokens(self) -> int:
        """Maximum tokens of a sequence that fits into `ceiling_block_count` blocks."""
        return self.ceiling_block_count * self.block_tokens

    @property
    def running_count(self) -> int:
        returning_count = len(self.swap.returning) if self.swap.entries else 0
        return len(self.running) + len(self.suspended) + returning_count

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences in order of service."""
        return list(self.line)

    @property
    def settled(self) -> bool:
        """True if reserved blocks and running sequences do not exceed the capacity."""
        return self.free_block_count >= 0 and self.running_count <= self.max_running_count

    def resize(self, block_count: int, lent_block_count: int, before_block_count: int = 0) -> None:
        """Set the number of blocks. `lent_block_count`: see `CapacityChanged`. `before_block_count`: a larger number
        that may be available again soon; sequences that need it wait instead of ending with an error.
        """
        self.ceiling_block_count = max(block_count, before_block_count)
        self.block_count = block_count
        self.lent_block_count = lent_block_count

    def need(self, sequence: Sequence) -> int:
        """Number of blocks for the sequence's tokens and its next one, which is left out if the sequence fills the
        whole cache.
        """
        with_next = blocks_for(sequence.token_count + 1, self.block_tokens)
        return min(with_next, max(self.block_count, blocks_for(sequence.token_count, self.block_tokens)))

    def _reserve(self, sequence: Sequence, added_block_count: int) -> None:
        self.reserved_block_count += added_block_count
        sequence.reserved_block_count += added_block_count
        sequence.reserved_tokens = sequence.reserved_block_count * self.block_tokens

    def _unreserve(self, sequence: Sequence, *, kept: bool) -> None:
        """Release the sequence's reservation. `kept`: its computed KV is valid and may be retained for prefix hits."""
        if kept:
            self.prefixes.name(sequence)
        self.reserved_block_count += self.prefixes.leave(sequence, kept=kept)
        self._reserve(sequence, -sequence.reserved_block_count)

    def share(self, sequence: Sequence, numbers: Collection[BlockNumber]) -> None:
        """Count the first blocks of a suspended sequence, which have these `numbers`, only once for all sequences that
        share them, including those that wait for room.
        """
        self._reserve(sequence, max(0, len(numbers) - sequence.reserved_block_count))
        self.reserved_block_count -= self.prefixes.hold(sequence.sequence_id, numbers)
