"""What has become of the sequences that left this worker while they ran: counted on the engine thread, read on any."""

from dataclasses import dataclass, field

from services.worker.core.migration_messages import Report

# Upper bounds of the classes that downtimes are counted in; a decode step takes some of the first.
DOWNTIME_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(slots=True)
class MigrationTotals:
    moved: int = 0
    not_moved: int = 0
    recomputed: int = 0  # part of `moved`: their KV did not come, or that is not known
    blocks: int = 0
    downtime_s: float = 0.0  # of all
    max_downtime_s: float = 0.0
    downtime_counts: list[int] = field(default_factory=lambda: [0] * (len(DOWNTIME_BOUNDS_S) + 1))

    def count(self, report: Report) -> None:
        if not report.moved:
            self.not_moved += 1
            return
        self.moved += 1
        self.recomputed += not report.with_kv
        self.blocks += report.copied_blocks + report.last_blocks
        self.downtime_s += report.downtime_s
        self.max_downtime_s = max(self.max_downtime_s, report.downtime_s)
        index = sum(report.downtime_s > bound for bound in DOWNTIME_BOUNDS_S)
        self.downtime_counts[index] += 1
