"""KV that is copied ahead of a restore, for the transitions in virtual time: questions and answers take their time, or
never come; the commit does not wait for ever.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ballast.common.ids import WorkerId
from ballast.common.layout import Layout
from ballast.common.transition import Phase, TransitionKind
from services.worker.core import plan as wp
from services.worker.core import transition as wt
from services.worker.core import transition_messages as wm
from services.worker.core.batch import Batch, Slice
from services.worker.core.precopy import Precopy, Span, sources_of

BLOCK_TOKENS = 4
_BEFORE = (Phase.PREPARING, Phase.PREPARED)  # the commit


@dataclass
class SimWorker:
    name: WorkerId
    layout: Layout  # whose role it plays
    led: dict[int, int] = field(default_factory=dict[int, int])  # sequence -> computed tokens, if it leads
    waiting: set[int] = field(default_factory=set[int])  # suspended ones among them
    later: dict[int, wp.Victim] = field(default_factory=dict[int, wp.Victim])  # leader: of later waves
    kv: dict[int, set[int]] = field(default_factory=dict[int, set[int]])  # sequence -> layers whose KV is here
    transition: wt.Transition | None = None
    precopy: Precopy | None = None  # of a restore that is prepared or carried out
    aborted: int = 0  # an epoch that was taken back before its Prepare came
    forming: bool = True  # may form batches
    alive: bool = True
    broken: bool = False


class SimWorld(Protocol):
    rng: random.Random
    now_s: float

    @property
    def workers(self) -> Mapping[WorkerId, SimWorker]: ...

    def after(self, delay_s: float, what: str, act: Callable[[], None]) -> None: ...

    def drive(self, worker: SimWorker, event: wm.Event) -> None: ...

    def assigned(self, plan: wp.Plan, worker: SimWorker, sequence: int) -> WorkerId: ...

    def old_leader(self, plan: wp.Plan, worker: SimWorker) -> WorkerId: ...


class Copies:
    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self.steps = 0
        self.copied_blocks = 0  # before a commit
        self.rests = 0  # pieces of KV of which only the rest travelled after one

    def begin(self, plan: wp.Plan, worker: SimWorker) -> Precopy | None:
        return Precopy(sources_of(plan, worker.name), BLOCK_TOKENS, 4) if plan.kind is TransitionKind.RESTORE else None

    def tell_batch(self, worker: SimWorker, stages: Sequence[SimWorker]) -> None:
        """Whoever may copy ahead hears what the stages have run."""
        copying = [
            w.precopy for w in stages if w.precopy is not None and w.transition and w.transition.phase in _BEFORE
        ]
        if not copying:
            return
        self.steps += 1
        slices = [Slice(i, n - 1, (0,), True) for i, n in worker.led.items() if i not in worker.waiting and n]
        batch = Batch(self.steps, (), (), tuple(slices))
        for precopy in copying:
            precopy.begins(batch)
            precopy.ran(batch)

    def go_on(self, worker: SimWorker, transition: wt.Transition, patience: int = 20) -> None:
        """The layers are back: blocks are asked for until nearly all are here, or long enough."""
        precopy, plan = worker.precopy, transition.plan
        if worker.transition is not transition or not worker.alive or transition.phase not in _BEFORE:
            return
        if precopy is not None and sources_of(plan, worker.name):
            leader = self._world.workers[self._world.old_leader(plan, worker)]
            precopy.share(i for i in leader.led if self._world.assigned(plan, leader, i) == worker.name)
            for source, span in precopy.wants():
                self.ask_ahead(worker, self._world.workers[source], span, precopy)
            precopy.check()
            self._world.after(0.05, f"{worker.name} copies", lambda: self.go_on(worker, transition, patience - 1))
        if precopy is None or not sources_of(plan, worker.name) or precopy.converged or patience <= 0:
            self._world.drive(worker, wm.MemoryReady(self._world.now_s, transition.epoch))

    def ask_ahead(self, worker: SimWorker, source: SimWorker, span: Span, precopy: Precopy) -> None:
        """Either way may take long, and a source that knows nothing of the restore says nothing."""

        def land(found: Span, step_id: int) -> None:
            if worker.precopy is precopy and precopy.landed(source.name, found, step_id):
                self.copied_blocks += found.last_block - found.first_block

        def answer() -> None:
            if source.alive and source.precopy is not None:
                found, step_id = source.precopy.offer(span)
                self._world.after(self._world.rng.uniform(0, 0.2), f"{source.name} ahead", lambda: land(found, step_id))

        self._world.after(self._world.rng.uniform(0, 0.05), f"{worker.name} asks ahead", answer)

    def count_rest(self, victim: wp.Victim, source: SimWorker, to: SimWorker) -> None:
        """What travels after the commit begins where the copied blocks end."""
        copied = 0 if to.precopy is None else to.precopy.copied_blocks(victim.sequence_id, source.name)
        assert copied * BLOCK_TOKENS <= victim.computed_tokens, "KV was copied of tokens that there are not"
        self.rests += copied > 0
