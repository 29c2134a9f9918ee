"""Faults put into prefix caching, one at a time: which history of `tests.support.prefix_history` sees each.

    python -m tests.support.prefix_mutants [--histories N] [NAME ...]

Each is a patch of production code in a process of its own.
"""

# Patches replace methods of any signature.
# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false, reportAttributeAccessIssue=false

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from services.worker.core import group_scheduler
from services.worker.core.blocks import BlockBook
from services.worker.core.prefixes import PrefixIndex
from services.worker.core.scheduler import Scheduler
from tests.support.pipeline_history import History
from tests.support.prefix_history import PrefixHistory

Patch = Callable[[], None]


def _instead(owner: Any, name: str, made: Callable[[Any], Any]) -> Patch:
    """`made` gets what was there."""
    return lambda: setattr(owner, name, made(getattr(owner, name)))


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
    """Sequences find what is being given up."""

    def forgotten(self: PrefixIndex, number: int) -> None:
        key = self._keys[number]
        forget(self, number)
        self._numbers[key], self._keys[number] = number, key
        self._retained[number] = 0.0

    return forgotten


def _alone(chain: Any) -> Any:
    """A key says nothing of what is before its block."""

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
    """Blocks get numbers before their tokens have KV."""

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
    """A prompt's blocks get numbers when the batch that computes them is formed."""

    def formed(self: Any, plan: Any) -> Any:
        execute = dispatch(self, plan)
        for sequence, _ in plan.chunks:
            computed, sequence.computed_tokens = sequence.computed_tokens, sequence.dispatched_tokens
            self._prefixes.name(sequence)
            sequence.computed_tokens = computed
        return execute

    return formed


def _shared_for_nothing(take: Any) -> Any:
    return lambda self, sequence: take(self, sequence) and 0


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
    """A follower gives up a number that its leader has not told it to."""

    def applied(self: BlockBook, batch: Any) -> Any:
        if self._first and self._numbered and batch.step_id % 7 == 0:
            self.forget([(next(iter(self._numbered)), 1)])
        return apply(self, batch)

    return applied


def _not_told(must_tell: Any) -> Any:
    def told(self: PrefixIndex) -> Any:
        named, forgotten, _ = must_tell(self)
        return named, forgotten, ()

    return told


def _begins_late(begin: Any) -> Any:
    """It is let in as computed before any batch says so."""

    def taken(self: PrefixIndex, sequence: Any) -> int:
        count = begin(self, sequence)
        sequence.computed_tokens = max(sequence.computed_tokens, sequence.dispatched_tokens)
        return count

    return taken


def _nothing(_: Any) -> Any:
    return lambda *_args, **_named: None


MUTANTS: Mapping[str, tuple[Patch, ...]] = {
    "claim-too-few": (_instead(BlockBook, "_take", _one_claim_less),),
    "claim-too-many": (_instead(BlockBook, "_name", _one_claim_more),),
    "found-while-given-up": (_instead(PrefixIndex, "_forget", _keeps_key),),
    "key-without-what-is-before": (_instead(PrefixIndex, "_chain", _alone),),
    "key-without-salt": (_instead(PrefixIndex, "_chain", _without_salt),),
    "whole-prompt-taken": (_instead(PrefixIndex, "match", _whole_prompt),),
    "named-without-kv": (_instead(PrefixIndex, "name", _names_ahead),),
    "named-at-departure": (_instead(group_scheduler.InFlightBatches, "dispatch", _names_at_departure),),
    "shared-reserved-twice": (_instead(PrefixIndex, "take", _shared_for_nothing),),
    "nothing-given-up": (_instead(PrefixIndex, "fit", _nothing),),
    "head-before-tail": (_instead(PrefixIndex, "leave", _head_first),),
    "removed-before-named": (_instead(BlockBook, "apply", _removed_first),),
    "compaction-forgets-numbers": (_instead(BlockBook, "compacted", _numbers_stay),),
    "stage-gives-up-too-early": (_instead(BlockBook, "apply", _gives_up_too_early),),
    "taken-and-not-told": (_instead(PrefixIndex, "take_news", _not_told),),
    "computed-before-any-batch-says-so": (_instead(PrefixIndex, "take", _begins_late),),
    "role-change-keeps-numbers": (_instead(BlockBook, "forget_numbers", _nothing),),
    "displaced-are-named": (_instead(Scheduler, "forget_prefixes", lambda _: _forget_none_displaced),),
}


def _forget_none_displaced(self: Scheduler) -> None:
    self.reserved_block_count += self.prefixes.forget_all([])


def look_for(name: str, count: int) -> str:
    """The first error that the mutant causes, in this process: it is of no use for anything else afterwards."""
    for patch in MUTANTS[name]:
        patch()
    for seed in range(count):
        for made in (PrefixHistory(seed, seed % 3), History(seed)):
            try:
                made.play()
            except Exception as error:  # noqa: BLE001 whatever breaks has been seen
                words = (str(error).splitlines() or [""])[0][:90]
                return f"{type(made).__name__} {seed}: {type(error).__name__}: {words}"
    return f"not seen in {count} histories of both kinds"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="all if none is given")
    parser.add_argument("--histories", type=int, default=40)
    parser.add_argument("--here", action="store_true", help="in this process: one mutant")
    args = parser.parse_args()
    for name in args.names or MUTANTS:
        if args.here:
            print(look_for(name, args.histories), flush=True)
            continue
        command = [
            sys.executable,
            "-m",
            "tests.support.prefix_mutants",
            "--here",
            "--histories",
            str(args.histories),
            name,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=600)
        print(f"{name:34} {done.stdout.strip() or done.stderr.strip().splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
