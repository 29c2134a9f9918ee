"""What the planner and the members of groups say to each other of a change of the layout."""

from dataclasses import dataclass
from enum import StrEnum

from ballast.common.ids import Epoch


class TransitionKind(StrEnum):
    DROP = "drop"  # instances merge into groups; layers held twice make room for KV
    RESTORE = "restore"  # members get all layers back; groups dissolve


class Phase(StrEnum):
    """How far a member is. A later one is never followed by an earlier one."""

    NONE = "none"  # it knows nothing of the epoch
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"  # waits for the step boundary, or for the other members
    EXCHANGING = "exchanging"  # the new layout is in force; KV of victims travels
    DONE = "done"
    FAILED = "failed"  # before commit: Abort follows; after it: a member was lost, this one gets its layers by itself
    ABORTED = "aborted"


@dataclass(slots=True, kw_only=True)
class Status:
    """How far a transition is on one member, and what it has counted. Seconds are of its own clock."""

    epoch: Epoch
    phase: Phase = Phase.NONE
    why: str = ""
    block_count_before: int = 0  # KV blocks of this stage
    block_count_after: int = 0
    freed_parameter_bytes: int = 0
    kv_bytes_to_send: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    parameter_bytes_to_pull: int = 0
    parameter_bytes_pulled: int = 0
    victim_count: int = 0  # of the whole group; the leader says it
    victims_waiting: int = 0
    victims_recomputed: int = 0  # there was no room for their KV: they start over
    prepare_s: float = 0.0
    layers_s: float = 0.0  # of a restore: from hearing of it until all layers are here
    remap_s: float = 0.0
    boundary_wait_s: float = 0.0  # from Commit to the new layout in force
    exchange_s: float = 0.0
    max_stall_s: float = 0.0  # longest time that a victim has waited for its KV
    p99_stall_s: float = 0.0
    repulled_layers: int = 0  # their checksum was wrong
    waves: int = 0  # of victims, as room for their KV was made by sending the KV of those before
