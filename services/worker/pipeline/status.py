"""How far a transition is on this worker, as the planner and operators see it."""

import math
from dataclasses import dataclass, field

from ballast.common.ids import Epoch
from services.worker.core.plan import Phase


@dataclass(slots=True)
class Progress:
    """Counted while a transition goes on. Seconds are of this worker's clock."""

    epoch: Epoch
    began_s: float
    phase: Phase = Phase.PREPARING
    why: str = ""
    block_count_before: int = 0
    block_count_after: int = 0
    freed_parameter_bytes: int = 0
    kv_bytes_to_send: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    parameter_bytes_to_pull: int = 0
    parameter_bytes_pulled: int = 0
    victim_count: int = 0
    victims_waiting: int = 0
    victims_recomputed: int = 0
    waves: int = 0  # of victims, as room for their KV was made by sending the KV of those before
    links_s: float = 0.0  # from hearing of the plan
    layers_s: float = 0.0  # of a restore: until all layers are here
    room_s: float = 0.0  # of a restore: until there is room for copies of the KV
    memory_s: float = 0.0
    prepare_s: float = 0.0
    remap_s: float = 0.0
    boundary_wait_s: float = 0.0
    exchange_s: float = 0.0
    max_stall_s: float = 0.0
    p99_stall_s: float = 0.0
    repulled_layers: int = 0
    kv_bytes_copied_ahead: int = 0  # before the commit; not among those received
    victims_copied_ahead: int = 0  # that lacked only the rest of their KV at the commit
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
            "room_s": round(self.room_s, 4),
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
