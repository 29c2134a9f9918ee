"""Measurements with emulated workers, whose steps take as long as a GPU's. Checks that this machine kept up.

Services, links, transitions and KV accounting are real and share this machine's processors. If the processors are too
few, steps or the client are late, and the run is void.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ballast.common.errors import Unavailable
from tools.bench.results import BenchResult
from tools.bench.sizing import SizingPace, Speed
from tools.local.cluster import LocalCluster
from tools.model.info import CheckpointInfo

MOST_LOST = 0.02  # limit on lost time, as a fraction of the ideal step time
MOST_LAG_S = 0.25  # limit on the P99 delay of sending requests
_FEW = 2  # number of requests on a lightly loaded worker
_SAID = re.compile(r" emulated .*\bdue_s=([0-9.]+).* late_s=([0-9.]+).* lost_s=([0-9.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """An emulated machine and model, with the figures that a comparison would otherwise measure."""

    info: CheckpointInfo  # the model; its folder has the checkpoint files that services read
    gpu: str  # display name of an instance's GPUs
    worker_flags: Sequence[str]
    memory_bytes: int  # device memory of a worker
    capacity_tokens: int  # KV tokens of a worker with full parameters
    prompt_s: Callable[[int], float]  # prompt length -> prefill time
    step_s: Callable[[int, int], float]  # (number of requests, tokens of each) -> time of a decode step
    last_token: Callable[[Sequence[int], int], int]  # (prompt, output length) -> last token of the answer

    def speed(self, input_tokens: int, output_tokens: int, workers: int) -> Speed:
        """The speeds that probes would measure on a cluster of `workers`, for requests of these lengths."""
        few, full = _FEW, max(_FEW + 1, self.capacity_tokens // (input_tokens + output_tokens))

        def pace(count: int) -> SizingPace:
            each_s = self.step_s(count, input_tokens + output_tokens // 2)
            each_s += count * self.prompt_s(input_tokens) / output_tokens
            return SizingPace(workers * count / each_s, each_s)

        return Speed(workers * few, pace(few), workers * full, pace(full))


class ProcessorUsage:
    """The processor time that a cluster and its client (this process) have used since construction."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._pids = {process.pid for of in cluster.processes.values() for process in of}
        self._began = time.monotonic(), time.process_time(), _cpu_s(self._pids)

    def cores(self) -> dict[str, float]:
        """Average number of busy processors, of the services and of the client."""
        at_s, client_s, services_s = self._began
        spent_s = max(1e-9, time.monotonic() - at_s)
        return {
            "services_cores": round((_cpu_s(self._pids) - services_s) / spent_s, 3),
            "client_cores": round((time.process_time() - client_s) / spent_s, 3),
        }


def with_settings(result: BenchResult, more: Mapping[str, str | float]) -> BenchResult:
    cluster = {**result.config.cluster, **more}
    return result.model_copy(update={"config": result.config.model_copy(update={"cluster": cluster})})


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late the steps of all workers were."""

    late_share: float  # sum of delays, as a fraction of the ideal step time
    lost_share: float  # sum of delays that were never caught up, as a fraction of the ideal step time


def lateness(log_dir: Path) -> Lateness:
    """The lateness of all workers' steps, from the last report in each worker's log.

    Raises:
        Unavailable: a worker has not reported its steps' times, or none has executed a step.
    """
    said = {log.stem: _SAID.findall(log.read_text(errors="replace")) for log in sorted(log_dir.glob("worker-*.log"))}
    silent = ", ".join(worker for worker, found in said.items() if not found)
    last = [found[-1] for found in said.values() if found]  # logs also contain earlier runs
    due_s, late_s, lost_s = (sum(float(of[number]) for of in last) for number in range(3))
    if silent or not due_s:
        raise Unavailable(silent or "workers", f"have not said in {log_dir} how long their steps took")
    return Lateness(late_s / due_s, lost_s / due_s)


def with_effort(result: BenchResult, log_dir: Path) -> BenchResult:
    """The result with the delays of the emulated workers' steps added.

    Raises:
        Unavailable: see `lateness`.
    """
    late = lateness(log_dir)
    return with_settings(result, {"late_share": round(late.late_share, 5), "lost_share": round(late.lost_share, 5)})


def why_void(result: BenchResult) -> str:
    """Why an emulated run is void; empty if the machine kept up."""
    [policy] = result.policies.values()
    lost, lag_s = float(result.config.cluster["lost_share"] or 0.0), policy.send_lag_s.p99 or 0.0
    if lost > MOST_LOST:
        return f"steps of the workers took {lost:.1%} longer than on the GPU (at most {MOST_LOST:.0%})"
    if lag_s > MOST_LAG_S:
        return f"requests were sent {lag_s:.2f} s late at P99 (at most {MOST_LAG_S:g} s)"
    return ""


def _cpu_s(pids: set[int]) -> float:
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended, or this system has no /proc
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
