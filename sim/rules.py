"""Rules of all services, in the form that their cores take. Set by the caller of a simulation."""

from dataclasses import dataclass, field

from services.monitor.core.machine import MonitorRules
from services.planner.core.machine import PlannerRules
from services.planner.policy.migrate import MigrationRules
from sim.dispatcher import DispatcherRules


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRules:
    """Rules of a worker; the world adds those that depend on the model."""

    block_tokens: int
    max_running_count: int
    max_batch_tokens: int
    max_waiting_count: int
    max_waiting_tokens: int
    admission_reserve_fraction: float
    report_interval_s: float
    lookahead: bool  # microbatches of equal cost; otherwise of equal token counts
    tpot_target_s: float | None = None  # target of the time per token; None: no target
    ttft_target_s: float | None = None  # TTFT target: long steps of offline requests get safepoints to meet it
    offline_slowdown: float = 0.25  # maximum slowdown of a step by offline work, without a target
    swap_space_bytes: int = 0  # host memory per instance for KV of preempted requests; 0: recompute them
    swaps_online: bool = True  # False: only offline requests are swapped
    swap_blocks_per_step: int = 0  # 0: as many as can be copied during a step
    activation_log: bool = False  # True: a stand-in computes lost KV from logged activations
    prefix_caching: bool = False  # True: for clients with `hash_ids`


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRules:
    monitor: MonitorRules
    planner: PlannerRules
    dispatcher: DispatcherRules
    worker: WorkerRules
    migrations: MigrationRules
    monitor_tick_s: float
    backlog_interval_s: float = field(default=0.05)  # the dispatchers' publishing interval
    coordinated: bool = True  # urgent messages overtake bulk data; otherwise FIFO
