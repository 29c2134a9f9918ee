"""How far a transition is on this worker, as the planner and operators see it."""

import math
from dataclasses import dataclass, field

from ballast.common.transition import Phase, Status


@dataclass(slots=True, kw_only=True)
class Progress(Status):
    """Counted while a transition goes on, and where its time went."""

    began_s: float
    phase: Phase = Phase.PREPARING
    links_s: float = 0.0  # from hearing of the plan
    memory_s: float = 0.0
    commit_at_s: float = 0.0
    halted_at_s: float = 0.0  # since then victims get no tokens, or have got the last one at the latest
    taken_up_at_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list[float])  # of each victim, from then until it may go on

    def until_taken_up(self) -> dict[str, float]:
        """Where the time from hearing of the plan to the new layout went."""
        waited_s = self.commit_at_s - self.began_s - self.prepare_s
        return {
            "links_s": round(self.links_s, 4),
            "layers_s": round(self.layers_s, 4),
            "memory_s": round(self.memory_s, 4),
            "prepare_s": round(self.prepare_s, 4),
            "commit_awaited_s": round(waited_s, 4),
            "boundary_wait_s": round(self.boundary_wait_s, 4),
            "remap_s": round(self.remap_s, 4),
        }

    def note_stall(self, stall_s: float) -> None:
        self.stalls_s.append(stall_s)
        self.stalls_s.sort()
        self.max_stall_s = self.stalls_s[-1]
        self.p99_stall_s = self.stalls_s[math.ceil(0.99 * len(self.stalls_s)) - 1]
