"""The settings of all services, as their cores take them. Whoever starts a simulation fills them in."""

from dataclasses import dataclass, field

from services.monitor.core.machine import MonitorRules
from services.planner.core.machine import PlannerRules
from services.planner.policy.migrate import MigrationRules
from sim.dispatcher import DispatcherRules


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRules:
    """Counts and times of a worker; what depends on the model is added in the world."""

    block_tokens: int
    max_running_count: int
    max_batch_tokens: int
    max_waiting_count: int
    max_waiting_tokens: int
    admission_reserve_fraction: float
    report_interval_s: float
    lookahead: bool  # microbatches of equal cost; else of equal numbers of tokens
    tpot_target_s: float | None = None  # what a token may take; None: whatever it does
    ttft_target_s: float | None = None  # what a first token may take: long steps of offline work alone are cut for it
    offline_slowdown: float = 0.25  # without a target, a step takes so much longer at most
    swap_space_bytes: int = 0  # host memory of an instance for KV of who gives way; 0: they are computed anew
    swaps_online: bool = True  # False: it is for offline requests alone
    swap_blocks_per_step: int = 0  # 0: as many as hide behind a step
    prefix_caching: bool = False  # KV of equal prompt beginnings is computed once: for clients with `hash_ids`


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRules:
    monitor: MonitorRules
    planner: PlannerRules
    dispatcher: DispatcherRules
    worker: WorkerRules
    migrations: MigrationRules
    monitor_tick_s: float
    backlog_interval_s: float = field(default=0.05)  # as dispatchers tell of theirs
    coordinated: bool = True  # what pipelines send overtakes bulk data; else it waits for all that is ahead of it
