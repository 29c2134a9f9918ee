"""Puts known faults back into production code, one at a time, and finds the first campaign seed that detects each.

    python -m tests.support.mutants [--seeds N] [NAME ...]

Each mutant is a patch that is applied in a separate process.
"""

# Patches replace methods of any signature.
# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false, reportAttributeAccessIssue=false

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ballast.common.ids import Epoch
from ballast.rpc.fencing import Fence
from services.planner.core import transition as planner_transition
from services.planner.core.evictions import Suspects
from services.planner.core.machine import PlannerCore
from services.planner.core.membership import Membership
from services.planner.core.stages import Stage
from services.planner.core.store_sync import StoreSync
from services.planner.core.transition import Coordinator
from services.worker.core.arrivals import KvArrivals
from services.worker.core.mover import Mover
from services.worker.core.suspended import Suspended
from services.worker.core.transition import Reception, Transition
from services.worker.core.transition_messages import PeerLost
from services.worker.emulation.phantom import Phantom
from services.worker.pipeline import member, stage_runner
from services.worker.pipeline.driver import TransitionDriver
from services.worker.pipeline.handover import Handover
from services.worker.pipeline.planner_side import Transitions
from sim.dispatcher import DispatcherNode
from tests.support.cluster_campaign import story

_TIMEOUT_S = 3600.0

Patch = Callable[[], None]


def instead(owner: Any, name: str, made: Callable[[Any], Any]) -> Patch:
    """A patch that replaces an attribute by `made(attribute)`. Raises AttributeError at once if there is no such
    attribute, so that a mutant whose target was removed is noticed.
    """
    replaced = getattr(owner, name)
    return lambda: setattr(owner, name, made(replaced))


def _never(_: Any) -> Any:
    return lambda *_args, **_named: False


def nothing(_: Any) -> Any:
    return lambda *_args, **_named: None


def _ignores_exclusion(reception: Any) -> Any:
    """B1: a plan without a member's group does not notify the member that its group has ended."""

    def answer(*args: Any, **named: Any) -> Reception:
        found = reception(*args, **named)
        return Reception.IGNORE if found is Reception.LEAVE else found

    return answer


def _without_answer(handle: Any) -> Any:
    """B3: the answer to an abort after the commit is ignored, and the planner keeps waiting for it."""

    def said(self: Coordinator, event: Any) -> Any:
        forward, planner_transition._FORWARD = planner_transition._FORWARD, ()
        try:
            return handle(self, event)
        finally:
            planner_transition._FORWARD = forward

    return said


def _waits_for_aborts(overdue: Any) -> Any:
    return lambda self, at_s: {} if self.stage is Stage.ABORTING else overdue(self, at_s)


def _untold(pass_on: Any) -> Any:
    """The leader aborts a restore without notifying its followers."""

    def kept(self: TransitionDriver, epoch: Epoch) -> Any:
        links = self._links.pass_on
        self._links.pass_on = lambda *_: None
        try:
            pass_on(self, epoch)
        finally:
            self._links.pass_on = links

    return kept


def _kept_too(hand_over: Any) -> Any:
    """Two owners: sequences that were handed over also stay with this leader."""

    def give(self: Handover, event: Any) -> Any:
        from services.worker.core.events import Adopted

        hand_over(self, event)
        for snapshots in self._going.values():
            self._tell(Adopted(event.at_s, snapshots, frozenset(), frozenset(), True, frozenset()))

    return give


def _wrong_block(blocks: Any) -> Any:
    """The sender reads the blocks in a different order from the sequence's table."""
    return lambda self, piece: (*reversed(blocks(self, piece)),)


def _only_out(block_copies: Any) -> Any:
    """A follower stage never copies KV back from host memory."""
    return lambda batch, book: tuple(copy for copy in block_copies(batch, book) if copy.out)


def _forgets_early(dissolve: Any) -> Any:
    """A roster that arrives before this member's commit is discarded."""

    def dissolved(self: TransitionDriver) -> Any:
        self._early = []
        return dissolve(self)

    return dissolved


def _deaf_to_losses(handle: Any) -> Any:
    return lambda self, event: [] if isinstance(event, PeerLost) else handle(self, event)


def _leader_only(landed: Any) -> Any:
    """A migrated sequence runs in a pipeline as soon as the leader's stage has its KV."""

    def one(self: KvArrivals, at_s: float, migration_id: int, stage: Any, span: Any) -> Any:
        if (arrival := self._open.get(migration_id)) is not None and span is not None and stage in arrival.writing:
            arrival.writing = {stage}
        return landed(self, at_s, migration_id, stage, span)

    return one


def _without_minority_rule(gone: Any) -> Any:
    """A worker that answers neither monitor nor planner is removed, even if the monitor and the planner are the ones
    cut off.
    """
    return lambda self, _, groups, left: gone(self, 1 << 30, groups, left)


def _silence_is_death(_: Any) -> Any:
    """R1: a worker that does not report to the monitor is removed, even if it answers the planner."""
    return lambda self, *_: [(w, suspect.incarnation, suspect.why) for w, suspect in sorted(self._by_id.items())]


def _at_once(bind: Any) -> Any:
    """A moved request runs as soon as it is submitted, although its KV has not arrived."""
    return lambda *args: bind(*args) or True


MUTANTS: Mapping[str, tuple[Patch, ...]] = {
    "wrong-block": (instead(Mover, "_blocks", _wrong_block),),
    "B1-outside-not-told": (instead(member, "reception", _ignores_exclusion),),
    "B2-back-counts-as-whole": (instead(Membership, "disagrees", _never),),
    "B2b-no-deadline": (instead(Coordinator, "_overdue", lambda _: lambda *_: {}),),
    "B3-abort-unanswered": (
        instead(Coordinator, "_on_member_status", _without_answer),
        instead(Coordinator, "_overdue", _waits_for_aborts),
    ),
    "B9-refused-transfer": (instead(Mover, "refused", nothing),),  # a transfer that the link refuses is never retried
    "migrated-without-copy": (instead(Phantom, "clone", lambda _: lambda self: self),),
    "migrated-before-all-stages-have-it": (instead(KvArrivals, "landed", _leader_only),),
    "resumed-before-its-KV": (instead(Suspended, "bind", _at_once),),
    "swapped-out-for-good": (instead(stage_runner, "block_copies", _only_out),),
    "two-owners": (instead(Handover, "_hand_over", _kept_too),),
    "withdrawal-untold": (instead(TransitionDriver, "_pass_on_withdrawal", _untold),),
    "prepared-for-ever": (instead(Transitions, "_watch", nothing),),
    "peer-loss-ignored": (instead(Transition, "handle", _deaf_to_losses),),
    "early-roster-lost": (instead(TransitionDriver, "_dissolve", _forgets_early),),
    "silence-is-death": (instead(Suspects, "gone", _silence_is_death),),
    "minority-rule-gone": (instead(Suspects, "gone", _without_minority_rule),),
    "stream-not-made-anew": (instead(DispatcherNode, "_connect_again", nothing),),  # R11
    "claims-ignored": (instead(PlannerCore, "_take_up_claims", nothing),),
    "epochs-not-raised": (instead(StoreSync, "use", nothing),),
    "unfenced": (instead(Fence, "take", nothing),),
}


def look_for(name: str, seeds: int) -> str:
    """The first error that the mutant causes. Patches this process, which must not be used for anything else
    afterwards.
    """
    for patch in MUTANTS[name]:
        patch()
    for seed in range(seeds):
        try:
            story(seed)
        except Exception as error:  # noqa: BLE001 any error detects the mutant
            return f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0][:140]}"
    return f"not seen in {seeds} seeds"


def run_each(module: str, names: Iterable[str], look: Callable[[str, int], str], seeds: int) -> None:
    """Prints the result of `look(name, seeds)` for each mutant, or for those named on the command line, in separate
    processes.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="mutants to run (default: all)")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--here", action="store_true", help="run one mutant in this process")
    args = parser.parse_args()
    for name in args.names or names:
        if args.here:
            print(look(name, args.seeds), flush=True)
            continue
        command = [sys.executable, "-m", module, "--here", "--seeds", str(args.seeds), name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
        print(f"{name:34} {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    run_each("tests.support.mutants", MUTANTS, look_for, 10_000)
