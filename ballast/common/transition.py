"""Types in the planner's calls to workers about a change of the layout."""

from dataclasses import dataclass
from enum import StrEnum

from ballast.common.ids import Epoch


class TransitionKind(StrEnum):
    DROP = "drop"  # instances merge into groups, and drop replicated layers to make room for KV
    RESTORE = "restore"  # members load all layers again; groups dissolve


class Phase(StrEnum):
    """A member's progress in a transition. Phases only advance."""

    NONE = "none"  # the member does not know the epoch
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"  # waiting for the step boundary, or for the other members
    EXCHANGING = "exchanging"  # the new layout is in force; KV is being transferred
    DONE = "done"
    FAILED = "failed"  # before the commit: Abort follows; after it: a peer was lost, and this member reloads its layers
    ABORTED = "aborted"


@dataclass(slots=True, kw_only=True)
class Status:
    """Progress and counters of a transition on one member. Durations are measured by the member's clock."""

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
    victim_count: int = 0  # running requests of the whole group; reported by the leader
    victims_waiting: int = 0
    victims_recomputed: int = 0  # victims recomputed because memory or a stand-in's logged activations are missing
    refilled_tokens: int = 0  # tokens whose KV this stand-in has computed from logged activations
    prepare_s: float = 0.0
    layers_s: float = 0.0  # in a restore: from its start on this member until all layers are loaded
    remap_s: float = 0.0
    boundary_wait_s: float = 0.0  # time from Commit until the new layout is in force
    exchange_s: float = 0.0
    max_stall_s: float = 0.0  # longest wait of a moved sequence for its KV
    p99_stall_s: float = 0.0
    repulled_layers: int = 0  # layers loaded again because their checksum was wrong
    waves: int = 0  # rounds of sending the victims' KV, each limited by the memory that the previous one freed
