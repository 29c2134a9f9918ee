"""Puts faults into prefix caching, one at a time, and finds the first history of `tests.support.prefix_history`, or the
unit test, that detects each.

    python -m tests.support.prefix_mutants [--seeds N] [NAME ...]

Each mutant is a patch of production code, applied in a separate process.
"""

# Patches replace methods of any signature.
# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false, reportAttributeAccessIssue=false

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.worker.core import group_scheduler, plan
from services.worker.core.blocks import BlockBook
from services.worker.core.host_prefixes import HostPrefixes
from services.worker.core.prefixes import PrefixIndex
from services.worker.core.scheduler import Scheduler
from services.worker.core.swapping import SwapSpace
from services.worker.core.transition_state import TransitionState
from tests.support.mutants import Patch, instead, nothing, run_each
from tests.support.pipeline_history import History
from tests.support.prefix_history import PrefixHistory


def _one_claim_less(take: Any) -> Any:
    def taken(self: BlockBook, sequence_id: int, numbers: Any) -> None:
        take(self, sequence_id, numbers)
        for block_id in self.table(sequence_id):
            self._claims[block_id] -= 1

    return taken


def _one_claim_more(name: Any) -> Any:
    def named(self: BlockBook, sequence_id: int, first_block: int, first_number: int, count: int) -> None:
        name(self, sequence_id, first_block, first_number, count)
        for block_id in self.table(sequence_id)[first_block : first_block + count]:
            self._claims[block_id] += 1

    return named


def _keeps_key(forget: Any) -> Any:
    """Matching still finds evicted blocks."""

    def forgotten(self: PrefixIndex, number: int, used_at_s: float = 0.0) -> bool:
        key = self._keys[number]
        stays = forget(self, number, used_at_s)
        self._numbers[key], self._keys[number] = number, key
        self._retained[number] = 0.0
        return stays

    return forgotten


def _alone(chain: Any) -> Any:
    """A key does not depend on the preceding blocks."""

    def made(self: PrefixIndex, sequence: Any, block_count: int) -> Any:
        size = self._block_tokens
        return [bytes(str(sequence.token_ids(i * size, size)), "ascii") for i in range(block_count)]

    return made


def _without_salt(chain: Any) -> Any:
    def made(self: PrefixIndex, sequence: Any, block_count: int) -> Any:
        sequence.cache_salt = b""
        return chain(self, sequence, block_count)

    return made


def _whole_prompt(match: Any) -> Any:
    def found(self: PrefixIndex, sequence: Any) -> Any:
        sequence.token_count += 1
        try:
            return match(self, sequence)
        finally:
            sequence.token_count -= 1

    return found


def _names_ahead(name: Any) -> Any:
    """Blocks get numbers before the KV of their tokens is computed."""

    def named(self: PrefixIndex, sequence: Any) -> None:
        computed, sequence.computed_tokens = (
            sequence.computed_tokens,
            max(sequence.computed_tokens, sequence.dispatched_tokens),
        )
        try:
            name(self, sequence)
        finally:
            sequence.computed_tokens = computed

    return named


def _names_at_departure(dispatch: Any) -> Any:
    """A prompt's blocks get numbers as soon as a batch is formed to compute them."""

    def formed(self: Any, plan: Any) -> Any:
        execute = dispatch(self, plan)
        for sequence, _ in plan.chunks:
            computed, sequence.computed_tokens = sequence.computed_tokens, sequence.dispatched_tokens
            self._prefixes.name(sequence)
            sequence.computed_tokens = computed
        return execute

    return formed


def _shared_fornothing(take: Any) -> Any:
    return lambda self, sequence, from_host=0: take(self, sequence, from_host) and 0


def _head_first(leave: Any) -> Any:
    def left(self: PrefixIndex, sequence: Any, *, kept: bool) -> int:
        if (held := self._held.get(sequence.sequence_id)) is not None:
            held.reverse()
        return leave(self, sequence, kept=kept)

    return left


def _removed_first(apply: Any) -> Any:
    def applied(self: BlockBook, batch: Any) -> Any:
        for sequence_id in batch.removed:
            self.release(sequence_id)
        return apply(self, batch)

    return applied


def _numbers_stay(compacted: Any) -> Any:
    def moved(self: BlockBook, moves: Any) -> None:
        numbered = dict(self._numbered)
        compacted(self, moves)
        self._numbered = numbered

    return moved


def _gives_up_too_early(apply: Any) -> Any:
    """A follower drops a number before its leader orders it."""

    def applied(self: BlockBook, batch: Any) -> Any:
        if self._first and self._numbered and batch.step_id % 7 == 0:
            self.forget([(next(iter(self._numbered)), 1)])
        return apply(self, batch)

    return applied


def _not_told(needs_release_batch: Any) -> Any:
    def told(self: PrefixIndex) -> Any:
        named, forgotten, _ = needs_release_batch(self)
        return named, forgotten, ()

    return told


def _begins_late(begin: Any) -> Any:
    """A sequence counts as computed before any batch announces it."""

    def taken(self: PrefixIndex, sequence: Any, from_host: int = 0) -> int:
        count = begin(self, sequence, from_host)
        sequence.computed_tokens = max(sequence.computed_tokens, sequence.dispatched_tokens)
        return count

    return taken


def _without_seed(chain: Any) -> Any:
    """A key does not depend on model, revision, dtype and adapter."""

    def made(self: PrefixIndex, sequence: Any, block_count: int) -> Any:
        self._seed = b""
        return chain(self, sequence, block_count)

    return made


def _without_adapter(chain: Any) -> Any:
    """A key does not depend on the adapter that computed its block."""

    def made(self: PrefixIndex, sequence: Any, block_count: int) -> Any:
        sampling, sequence.sampling = sequence.sampling, replace(sequence.sampling, adapter="")
        try:
            return chain(self, sequence, block_count)
        finally:
            sequence.sampling = sampling

    return made


def _holds_once(take: Any) -> Any:
    """The leader counts only one holder per block."""

    def taken(self: PrefixIndex, sequence: Any, from_host: int = 0) -> int:
        before = dict(self._holders)
        count = take(self, sequence, from_host)
        self._holders |= {number: held for number, held in before.items() if self._holders[number] > held}
        return count

    return taken


def _gives_up_held(leave: Any) -> Any:
    """The first holder that leaves releases a block that another one still holds."""

    def left(self: PrefixIndex, sequence: Any, *, kept: bool) -> int:
        for number in self._held.get(sequence.sequence_id, ()):
            if number is not None and self._holders[number] == 2:
                self._holders[number] = 1
        return leave(self, sequence, kept=kept)

    return left


def _kept_though_lost(unreserve: Any) -> Any:
    return lambda self, sequence, *, kept: unreserve(self, sequence, kept=True)


def _taken_though_gone(leave: Any) -> Any:
    def left(self: PrefixIndex, sequence: Any, *, kept: bool) -> int:
        begun, held = [*self._begun], self._held.get(sequence.sequence_id)
        count = leave(self, sequence, kept=kept)
        if sequence in begun and held is not None:
            self._begun = begun
            self._held[sequence.sequence_id] = held
        return count

    return left


def _moved_twice(compaction_plan: Any) -> Any:
    """A block in two tables is moved twice."""

    def planned(self: BlockBook, block_count: int) -> Any:
        moves = compaction_plan(self, block_count)
        shared = [move for move in moves if sum(move[0] in table for table in self._tables.values()) > 1]
        return (*moves, *shared)

    return planned


def _landed_at_once(copy: Any) -> Any:
    """A host copy is used before the batch that makes it has completed."""

    def copied(self: HostPrefixes, numbers: Any) -> Any:
        blocks = copy(self, numbers)
        self.landed([number for number, _ in numbers], good=True)
        return blocks

    return copied


def _good_though_failed(landed: Any) -> Any:
    return lambda self, numbers, *, good: landed(self, numbers, good=True)


def _good_though_gone(gone: Any) -> Any:
    def went(self: HostPrefixes, number: int, *rest: Any) -> bool:
        copying = self._copying.pop(number, None)
        found = gone(self, number, *rest)
        if copying is not None:
            self._copying[number] = copying
        return found

    return went


def _from_anybody(donors: Any) -> Any:
    """A donor may hold its blocks on only some of the stages."""
    return lambda self, coming, _waiting: donors(self, coming, ())


def _without_donors(led: Any) -> Any:
    def led_(self: TransitionState, event: Any) -> Any:
        commands = led(self, event)
        self._donors.clear()
        return commands

    return led_


def _by_block_alone(_: Any) -> Any:
    """Blocks with equal ids are treated as shared, despite different prefixes or leaders."""
    return lambda victims, _epoch: {v.sequence_id: tuple(-1 - b for b in v.shared_blocks) for v in victims}


def _computed_at_once(bring: Any) -> Any:
    """A sequence that is swapped in is computed before its KV has arrived."""

    def brought(self: SwapSpace, sequence: Any, first: int, keys: Any) -> None:
        bring(self, sequence, first, keys)
        self.entries[sequence.sequence_id].copied_count = len(keys)

    return brought


MUTANTS: Mapping[str, tuple[Patch, ...]] = {
    "claim-too-few": (instead(BlockBook, "_take", _one_claim_less),),
    "claim-too-many": (instead(BlockBook, "_name", _one_claim_more),),
    "found-while-given-up": (instead(PrefixIndex, "_forget", _keeps_key),),
    "key-without-what-is-before": (instead(PrefixIndex, "_chain", _alone),),
    "key-without-salt": (instead(PrefixIndex, "_chain", _without_salt),),
    "whole-prompt-taken": (instead(PrefixIndex, "match", _whole_prompt),),
    "named-without-kv": (instead(PrefixIndex, "name", _names_ahead),),
    "named-at-departure": (instead(group_scheduler.InFlightBatches, "dispatch", _names_at_departure),),
    "shared-reserved-twice": (instead(PrefixIndex, "take", _shared_fornothing),),
    "nothing-given-up": (instead(PrefixIndex, "fit", nothing),),
    "head-before-tail": (instead(PrefixIndex, "leave", _head_first),),
    "removed-before-named": (instead(BlockBook, "apply", _removed_first),),
    "compaction-forgets-numbers": (instead(BlockBook, "compacted", _numbers_stay),),
    "stage-gives-up-too-early": (instead(BlockBook, "apply", _gives_up_too_early),),
    "taken-and-not-told": (instead(PrefixIndex, "drain_changes", _not_told),),
    "computed-before-any-batch-says-so": (instead(PrefixIndex, "take", _begins_late),),
    "role-change-keeps-numbers": (instead(BlockBook, "forget_numbers", nothing),),
    "key-without-seed": (instead(PrefixIndex, "_chain", _without_seed),),
    "key-without-adapter": (instead(PrefixIndex, "_chain", _without_adapter),),
    "holder-too-few": (instead(PrefixIndex, "take", _holds_once),),
    "given-up-while-held": (instead(PrefixIndex, "leave", _gives_up_held),),
    "kept-though-lost": (instead(Scheduler, "_unreserve", _kept_though_lost),),
    "taken-though-gone": (instead(PrefixIndex, "leave", _taken_though_gone),),
    "compaction-moves-twice": (instead(BlockBook, "compaction_plan", _moved_twice),),
    "host-copy-used-before-it-lands": (instead(HostPrefixes, "copy", _landed_at_once),),
    "host-copy-of-a-failed-step": (instead(HostPrefixes, "landed", _good_though_failed),),
    "host-copy-of-what-is-gone": (instead(HostPrefixes, "gone", _good_though_gone),),
    "host-copies-outlive-a-group": (instead(HostPrefixes, "clear", nothing),),
    "host-blocks-go-while-read": (instead(HostPrefixes, "read", nothing),),
    "computed-before-it-is-back": (instead(SwapSpace, "bring", _computed_at_once),),
    "displaced-are-named": (instead(Scheduler, "forget_prefixes", lambda _: _forget_none_displaced),),
    "donor-waits-itself": (instead(PrefixIndex, "donors", _from_anybody),),
    "resumes-before-its-donor": (instead(TransitionState, "led", _without_donors),),
    "shared-by-chance": (instead(plan, "shared_numbers", _by_block_alone),),
}


def _forget_none_displaced(self: Scheduler) -> None:
    self.reserved_block_count += self.prefixes.forget_all([])


def look_for(name: str, count: int) -> str:
    """The first history or unit test that fails with the mutant. Patches this process, which must not be used
    afterwards.
    """
    for patch in MUTANTS[name]:
        patch()
    for seed in range(count):
        for made in (PrefixHistory(seed, seed % 3), History(seed)):
            try:
                made.play()
            except Exception as error:  # noqa: BLE001 any error detects the mutant
                words = (str(error).splitlines() or [""])[0][:90]
                return f"{type(made).__name__} {seed}: {type(error).__name__}: {words}"
    files = (
        "test_prefixes.py",
        "test_host_prefixes.py",
        "test_blocks.py",
        "test_shared_blocks.py",
        "test_dissolving.py",
    )
    noted = _Failed()
    folder = Path(__file__).parents[1] / "unit/worker/core"
    options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--capture=fd"]
    with redirect_stdout(io.StringIO()):
        pytest.main([*options, *(str(folder / name) for name in files)], plugins=[noted])
    return noted.test or f"not seen in {count} histories of both kinds, nor by unit tests"


class _Failed:
    """Records the first test that fails."""

    test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.test:
            self.test = f"unit test {report.nodeid.rpartition('::')[2]}"


if __name__ == "__main__":
    run_each("tests.support.prefix_mutants", MUTANTS, look_for, 40)
