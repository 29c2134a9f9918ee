"""What a group of stages holds and has room for, in counts. `core.scheduler` decides by them."""

import bisect
import math
from collections import Counter

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
    """What a scheduler decides by."""

    microbatching: Microbatching = by_token_count  # forms the batches of a group of several stages
    target: TokenTarget | None = None  # what a token may take
    harvest: Harvest = Harvest()  # by what offline work is bounded


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
        """Numbers of blocks follow on `first_number`."""
        self.policies = policies = SchedulingPolicies() if policies is None else policies
        self.limits = limits
        self.block_tokens = limits.block_tokens
        self.former = BatchFormer(limits, policies.microbatching)
        self.block_count = block_count
        self.lent_block_count = 0
        self.expected_block_count = 0  # for sequences that come from other leaders, and
        self.expected_count = 0  # so many of these
        self.ceiling_block_count = block_count  # that there are, or may be soon
        self.admission_limit: int | None = None  # blocks; nothing new above it
        self.target = policies.target  # nothing new that would make tokens take longer
        self.has_targets = False  # some sequence that came has one
        self.stage_count = 1
        self.reserved_block_count: int = 0
        self.running: list[Sequence] = []  # in order of service
        self.suspended = Suspended(limits.block_tokens, self._reserve)
        self.line = WaitingLine()
        self.preemptions_total: int = 0
        self.turned: list[Sequence] = []  # let in, or put back into the line, since somebody looked
        self._awaited_block_count = 0  # blocks about to be free, for which sequences skip a step
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
        """Of the free blocks those that no newcomer gets while anything runs."""
        limited = self._limited_block_count
        return self.block_count - limited + reserved(limited, self.limits.admission_reserve_fraction)

    @property
    def _limited_block_count(self) -> int:
        """Blocks within which newcomers are let in."""
        return self.block_count if self.admission_limit is None else min(self.block_count, self.admission_limit)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of running online prompts in no batch yet. A long one counts as a full batch: another may come beside
        it.
        """
        most = self.limits.max_batch_tokens
        return sum([min(count, most) for count in self._left_tokens if count > 1])

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens of running online prompts in no batch yet."""
        return sum([count for count in self._left_tokens if count > 1])

    @property
    def _left_tokens(self) -> list[int]:
        """Of each running online sequence, and of each whose KV comes back, those in no batch yet."""
        online = [*self.online, *self.swap.returning] if len(self.swap) else self.online
        return [
            s.token_count - (s.computed_tokens if s.computed_tokens > s.dispatched_tokens else s.dispatched_tokens)
            for s in online
            if s.rank != OFFLINE_RANK
        ]

    @property
    def online(self) -> list[Sequence]:
        """Online sequences that run, in order of service."""
        running = self.running
        if not running or running[-1].rank != OFFLINE_RANK:
            return running
        return running[: bisect.bisect_left(running, OFFLINE_RANK, key=_rank)]

    @property
    def offline(self) -> list[Sequence]:
        """Offline sequences that run, or whose KV comes back for that, by arrival."""
        running, found = self.running, list[Sequence]()
        if running and running[-1].rank == OFFLINE_RANK:
            found = running[bisect.bisect_left(running, OFFLINE_RANK, key=_rank) :]
        if len(self.swap) and (back := [s for s in self.swap.returning if s.rank == OFFLINE_RANK]):
            found = sorted([*found, *back], key=order)
        return found

    @property
    def offline_block_count(self) -> int:
        """Blocks that only offline sequences hold. Online ones get them when they need them."""
        return self.prefixes.freed_count(self.offline)

    @property
    def wanted_by_waiting(self) -> tuple[int, int]:
        """Blocks, and tokens to be computed, that waiting online sequences want: what they share counts once."""
        return self.prefixes.wanted([(s, self.need(s)) for s in self.line.all_online])

    @property
    def busiest_caller_count(self) -> int:
        """Online sequences that run, of the caller that has the most of them."""
        return max(Counter([s.caller for s in self.online]).values(), default=0)

    @property
    def max_prompt_tokens(self) -> int:
        return most_prompt_tokens(self.limits.max_batch_tokens, self.stage_count)

    @property
    def max_running_count(self) -> int:
        """Each of the microbatches in flight may be a full one."""
        return self.limits.max_running_count * self.stage_count

    @property
    def has_limit(self) -> bool:
        """Whether how many may run depends on how long a token takes."""
        return self.target is not None and (self.has_targets or self.target.limits)

    @property
    def place_count(self) -> int:
        """Sequences that may run before newcomers wait. What already runs, or comes to run, is never too much by it."""
        if self.target is None or not self.has_limit:
            return self.max_running_count
        target_s = self._strictest_tpot_s if self.has_targets else None
        count = self.running_count + self.expected_count - len(self.offline)
        block_count = self.reserved_block_count + self.prefixes.shared_count + self.expected_block_count
        block_count -= sum([s.reserved_block_count for s in self.offline])
        token_count = block_count * self.block_tokens  # that a batch reads
        decoders = Decoders(count, token_count, self.stage_count)
        return self.target.place_count(decoders, self.max_running_count, target_s)

    @property
    def _strictest_tpot_s(self) -> float:
        """Of the online sequences that run, and of the one that is let in next; inf: none has a target."""
        head = self.line.online
        targets = [s.targets.tpot_s for s in self.online]
        return min(targets if head is None else [*targets, head.targets.tpot_s], default=math.inf)

    @property
    def max_in_flight_count(self) -> int:
        """Batches."""
        ahead = self.stage_count > 1 and self.line.count > 0
        return self.stage_count + self.former.ahead_count if ahead else self.stage_count

    @property
    def ceiling_tokens(self) -> int:
        """Tokens of the longest sequence that the whole cache can hold, or will be able to."""
        return self.ceiling_block_count * self.block_tokens

    @property
    def running_count(self) -> int:
        returning_count = len(self.swap.returning) if len(self.swap) else 0
        return len(self.running) + len(self.suspended) + returning_count

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait, in order of service."""
        return list(self.line)

    @property
    def settled(self) -> bool:
        """Whether what is reserved and what runs is within what there is."""
        return self.free_block_count >= 0 and self.running_count <= self.max_running_count

    def resize(self, block_count: int, lent_block_count: int, before_block_count: int = 0) -> None:
        """Of what there was before there may be that much again soon: what needs it waits, and is not too big."""
        self.ceiling_block_count = max(block_count, before_block_count)
        self.block_count = block_count
        self.lent_block_count = lent_block_count

    def need(self, sequence: Sequence) -> int:
        """Blocks for all its tokens and the next one. Less by that one only where the cache ends."""
        with_next = blocks_for(sequence.token_count + 1, self.block_tokens)
        return min(with_next, max(self.block_count, blocks_for(sequence.token_count, self.block_tokens)))

    def _reserve(self, sequence: Sequence, added_block_count: int) -> None:
        self.reserved_block_count += added_block_count
        sequence.reserved_block_count += added_block_count
        sequence.reserved_tokens = sequence.reserved_block_count * self.block_tokens

    def _unreserve(self, sequence: Sequence, *, kept: bool) -> None:
        """It holds nothing any more. `kept`: what it has computed is good, and may be retained."""
        if kept:
            self.prefixes.name(sequence)
        self.reserved_block_count += self.prefixes.leave(sequence, kept=kept)
        self._reserve(sequence, -sequence.reserved_block_count)
