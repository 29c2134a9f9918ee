"""Faults under load: all faults of `ballast chaos` for a long time, or one fault at a chosen moment.

    python -m benchmarks.nemesis --for 30m [--secure] [--seed 7]     # other flags are those of `ballast chaos`
    python -m benchmarks.nemesis --cases [--seconds 2 9 inf]         # a member of a pair stops, or dies in a change

The first form runs four workers and two of each control service, with three faults at a time. For each kind of fault it
prints P50 and P99 of two times: the longest time that any request was without a token until the cluster had recovered,
and the time until everything served again. The exit status is 1 if anything was lost, wrong, crashed or did not
recover.

In a case, two workers are merged to a pair under load. One of them is stopped (SIGSTOP) for seconds or forever, or
killed while a drop or a restore is in one of its stages. Then every live worker must be in the layout again, a drop and
a restore must succeed, and every answer must be the same as before.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from ballast.common.errors import BallastError
from tools.cli.main import main as ballast
from tools.local.chaos import Chaos, ChaosReport, ChaosRules
from tools.local.cluster import LocalCluster
from tools.local.faults import BACK_WITHIN_S, ClusterFault, Heal
from tools.model.tiny import make_tiny

_FLAGS = "--workers 4 --dispatchers 2 --monitors 2 --planners 2 --fault-every-s 4 --at-once 3"
_STAGES = ("preparing", "committing", "exchanging", "done")
_TRIES = 30  # attempts to hit a stage that lasts for milliseconds
_CHANGES_S = 120.0  # time limit for all attempts


@dataclass(frozen=True, slots=True)
class Case:
    """A fault of one worker: it is killed when `change` is in `stage`, or, without a change, stopped for `pause_s`."""

    victim: int  # 0: the pair's leader, 1: its other stage
    workers: int
    pause_s: float = math.inf  # inf: it never continues
    change: str = ""  # drop or restore
    stage: str = ""  # one of _STAGES

    def __str__(self) -> str:
        victim = f"{'the other stage' if self.victim else 'the leader'} of a pair, {self.workers} workers"
        if self.change:
            return f"{victim}, killed in a {self.change} that is {self.stage}"
        return f"{victim}, stopped {'for ever' if math.isinf(self.pause_s) else f'for {self.pause_s:g} s'}"


class NemesisMoment(Chaos):
    """Load on a cluster, and one fault in a pair of its workers."""

    def __init__(self, cluster: LocalCluster, case: Case, say: Callable[[str], None]) -> None:
        super().__init__(cluster, ChaosRules(max_tokens=160, request_every_s=0.1, every_kind=True), say)
        self._case = case
        self._pair = ("worker-0", "worker-1")

    async def _break_things(self) -> None:
        case = self._case
        async with asyncio.timeout(_CHANGES_S):
            if case.change != "drop":
                await self._carry_out(self._pair)
            await asyncio.sleep(1.0)
            if case.change:
                await self._find_stage()
        await self._suffer(ClusterFault(str(case), self._begin))

    async def _begin(self) -> tuple[str, float, Heal]:
        process = self._cluster.processes["worker"][self._case.victim]
        if self._case.change:
            process.child.send_signal(signal.SIGKILL)  # the keeper restarts it
            return f"{process.id} is killed", 0.0, self._is_back(process.id)
        self._cluster.kill("worker", self._case.victim, signal.SIGSTOP)
        if math.isinf(self._case.pause_s):
            return f"{process.id} is stopped for ever", 0.0, _nothing

        async def go_on() -> None:
            self._cluster.kill("worker", self._case.victim, signal.SIGCONT)

        return f"{process.id} is stopped", self._case.pause_s, go_on

    def _is_back(self, name: str) -> Heal:
        async def wait() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BACK_WITHIN_S):
                    while not any(p.child.returncode is None and p.address for p in self._cluster.find(name)):  # noqa: ASYNC110 - the keeper sets no asyncio.Event
                        await asyncio.sleep(0.05)

        return wait

    async def _find_stage(self) -> None:
        """Begin changes until one is in the case's stage.

        Raises:
            TimeoutError: the stage was missed in every attempt.
        """
        here, back = (self._pair, None) if self._case.change == "drop" else (None, self._pair)
        for _ in range(_TRIES):
            with contextlib.suppress(grpc.aio.AioRpcError, BallastError):
                epoch = await self._begin_change(here)
                if await self._phase_in_the_end(epoch, self._case.stage) == self._case.stage:
                    return
            await self._carry_out(back)
        raise TimeoutError(f"{self._case}: the stage was not seen in {_TRIES} changes")


async def _nothing() -> None:
    pass


async def run_case(case: Case, model: Path, logs: Path, say: Callable[[str], None] = print) -> ChaosReport:
    cluster = LocalCluster(
        model,
        workers=case.workers,
        device_memory_bytes=16 << 20,
        flags={"planner": ["--overload-policy", "recompute"], "worker": ["--dtype", "float64"]},
        log_dir=logs,
        stop_timeout_s=2.0,
    )
    async with cluster:
        report = await NemesisMoment(cluster, case, say).run()
        for processes in cluster.processes.values():
            for process in processes:
                process.may_end = True
        return report


def run_cases(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Stops a member of a pair, or kills it during a drop or a restore.")
    parser.add_argument("--seconds", type=float, nargs="+", default=[2, 4, 6, 9, 12, 20, 60, math.inf])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--logs", type=Path, default=Path("out/nemesis"))
    given = parser.parse_args(arguments)
    pairs = [*itertools.product((0, 1), given.workers)]  # (member of the pair, number of workers)
    cases = [Case(*pair, pause_s=pause_s) for pair in pairs for pause_s in given.seconds]
    cases += [Case(*pair, change=c, stage=stage) for pair in pairs for c in ("drop", "restore") for stage in _STAGES]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny("llama", Path(folder) / "tiny", max_len=512)
        for number, case in enumerate(cases):
            try:
                why = asyncio.run(run_case(case, model, given.logs / str(number))).why_not()
            except TimeoutError as error:
                why = str(error) or "a change before the fault did not end in time"
            failed += bool(why)
            print(f"{f'FAILED: {why}' if why else 'ok'}: {case}", flush=True)
    print(f"{failed} of {len(cases)} cases failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if "--cases" in sys.argv[1:]:
        sys.exit(run_cases([word for word in sys.argv[1:] if word != "--cases"]))
    sys.exit(ballast(["chaos", *_FLAGS.split(), *sys.argv[1:]]))
