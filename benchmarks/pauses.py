"""What becomes of a cluster when a member of a pipeline is silent for a while, without any connection being reset.

    python -m benchmarks.pauses --seconds 2 4 6 9 12 20 60 inf --workers 2 3

Two workers are made a pair by hand. One of them, its leader or its other stage, is stopped (SIGSTOP) and goes on later,
under load or idle. Then every living worker has to be in the layout again, alone or in the pair, as what it is: a drop
and a restore have to succeed, every answer has to be what it was before, and none may take longer than the limit.

With `--faults in out both` it is in a black hole instead: what is sent to it is lost, what it sends, or both, of
everything or (`links-in` ...) of the links between workers alone. See benchmarks/holes.py for what that takes.

With `--faults kill` its process is killed while a drop or a restore is in each of its stages, and started anew after
so many seconds:

    python -m benchmarks.pauses --faults kill --seconds 2 inf
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from ballast.client import AsyncClient
from ballast.client.types import ClusterStatus
from ballast.common.errors import BallastError, ConfigError
from ballast.common.sampling import SamplingParams
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from benchmarks.holes import Hole, HoledCluster
from tools.local.cluster import LocalCluster
from tools.model.tiny import make_tiny

LIMIT_S = 20.0  # of a request
RECOVERY_S = 15.0  # from the event, or its end
_PROMPTS = tuple(tuple(3 + (5 * i + 7 * j) % 400 for j in range(6 + 5 * i)) for i in range(6))
_ANSWER_TOKENS = 160
_EVERY_S = 0.1  # a request
_CHANGE_S = 60.0  # within which a drop or a restore has to end
_LINKS = ("links-in", "links-out", "links-both")
_FAULTS = ("pause", "kill", "in", "out", "both", *_LINKS)
_STAGES = ("preparing", "committing", "exchanging", "done")
_TRIES = 30  # to meet a change in a stage that lasts for milliseconds


@dataclass(frozen=True, slots=True)
class Case:
    fault: str  # of _FAULTS
    victim: str  # leader or stage
    pause_s: float  # inf: it never goes on
    workers: int
    loaded: bool
    change: str = ""  # drop or restore: while one is under way
    stage: str = ""  # of the change: one of _STAGES

    def __str__(self) -> str:
        length = "for ever" if math.isinf(self.pause_s) else f"{self.pause_s:g} s"
        load = "load" if self.loaded else "idle"
        when = f", {self.change} {self.stage}" if self.change else ""
        return f"{self.fault} {self.victim} of a pair{when}, {self.workers} workers, {load}, {length}"

    @property
    def victim_number(self) -> int:
        return 0 if self.victim == "leader" else 1

    @property
    def lasts(self) -> bool:
        return math.isinf(self.pause_s)

    def living(self) -> list[str]:
        """The workers that serve in the end. One without its links can serve alone."""
        gone = self.lasts and self.fault not in _LINKS
        return [f"worker-{i}" for i in range(self.workers) if not (gone and i == self.victim_number)]

    def partners(self) -> list[str]:
        """Two workers that can make a pair in the end, if there are two."""
        able = [f"worker-{i}" for i in range(self.workers) if not (self.lasts and i == self.victim_number)]
        return able[:2] if len(able) > 1 else []


@dataclass(slots=True)
class Found:
    """What came of a case. Seconds."""

    recovered_s: float = math.inf  # after the pause's end, or its begin where it has none
    dropped: bool = False
    restored: bool = False
    right: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list[str])
    slowest_s: float = 0.0
    story: list[str] = field(default_factory=list[str])

    def why_not(self, recovery_s: float = RECOVERY_S, limit_s: float = LIMIT_S) -> str:
        """Empty: all is as it has to be."""
        reasons = [
            f"not everybody served within {recovery_s:g} s ({self.recovered_s:.1f} s)"
            * (self.recovered_s > recovery_s),
            "no drop afterwards" * (not self.dropped),
            "no restore afterwards" * (not self.restored),
            f"{self.wrong} answers are wrong" * (self.wrong > 0),
            f"{len(self.failed)} requests failed: {self.failed[:1]}" * bool(self.failed),
            f"one took {self.slowest_s:.1f} s" * (self.slowest_s > limit_s),
        ]
        return "; ".join(reason for reason in reasons if reason)


class Scene:
    def __init__(self, cluster: LocalCluster, case: Case, hole: Hole | None) -> None:
        self._cluster = cluster
        self._case = case
        self._hole = hole
        self._client = AsyncClient(cluster.address)
        self._channel: grpc.aio.Channel = open_channel(cluster.address)
        self._planner = planner_pb2_grpc.PlannerServiceStub(self._channel)
        self._began_s = time.monotonic()
        self._expected: list[tuple[int, ...]] = []
        self._seen = ""
        self.found = Found()

    async def run(self) -> Found:
        case = self._case
        pair = ["worker-0", "worker-1"]
        try:
            self._expected = [await self._answer(i) for i in range(len(_PROMPTS))]
            if case.change != "drop":
                await self._change(drop=pair)
            async with self._load() if case.loaded else contextlib.nullcontext():
                await asyncio.sleep(1.0)
                if case.change:
                    await self._meet(pair)
                self._silence()
                event_s = time.monotonic()
                if not case.lasts:
                    await self._watch_for(case.pause_s)
                    self._heal()
                    event_s = time.monotonic()
                await self._recover(case.living(), event_s)
                await self._check_changes(case.living(), case.partners())
            if not case.loaded:
                await asyncio.gather(*(self._ask(i) for i in range(len(_PROMPTS))))
        finally:
            await self._client.close()
            await self._channel.close()
        return self.found

    def _silence(self) -> None:
        victim = self._case.victim_number
        if self._hole is None:
            self._cluster.kill("worker", victim, signal.SIGKILL if self._case.fault == "kill" else signal.SIGSTOP)
        else:
            self._hole.open(self._cluster.processes["worker"][victim])

    def _heal(self) -> None:
        if self._case.fault == "kill":
            self._cluster.respawn(f"worker-{self._case.victim_number}")
        elif self._hole is None:
            self._cluster.kill("worker", self._case.victim_number, signal.SIGCONT)
        else:
            self._hole.close()

    async def _meet(self, pair: Sequence[str]) -> None:
        """Returns when the change is in the stage.

        Raises:
            TimeoutError: it went through the stage unseen each time.
        """
        here, back = (pair, None) if self._case.change == "drop" else (None, pair)
        for _ in range(_TRIES):
            if await self._change(here, until=self._case.stage):
                return
            await self._change(back)
        raise TimeoutError(f"{self._case}: the stage was not seen in {_TRIES} changes")

    async def _check_changes(self, living: Sequence[str], partners: Sequence[str]) -> None:
        if self._shape(await self._client.status()) != sorted(living):
            self.found.restored = await self._succeeds(drop=None)
            self.found.dropped = not partners or await self._succeeds(drop=partners)
        else:
            self.found.dropped = not partners or await self._succeeds(drop=partners)
            self.found.restored = not partners or await self._succeeds(drop=None)

    # ------------------------------------------------------------ requests

    async def _answer(self, i: int) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        answer = await self._client.generate(token_ids=_PROMPTS[i], sampling=sampling, deadline_s=3 * LIMIT_S)
        return answer.token_ids

    async def _ask(self, i: int) -> None:
        began_s = time.monotonic()
        try:
            right = await self._answer(i) == self._expected[i]
        except BallastError as error:
            self.found.failed.append(f"{type(error).__name__}: {error}")
        else:
            self.found.right += right
            self.found.wrong += not right
        self.found.slowest_s = max(self.found.slowest_s, time.monotonic() - began_s)

    @contextlib.asynccontextmanager
    async def _load(self) -> AsyncGenerator[None]:
        over = asyncio.Event()

        async def arrivals() -> None:
            for i in itertools.count():
                if over.is_set():
                    return
                tasks.create_task(self._ask(i % len(_PROMPTS)))
                await asyncio.sleep(_EVERY_S)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(arrivals())
            try:
                yield
            finally:
                over.set()

    # ------------------------------------------------------------ the layout

    def _shape(self, status: ClusterStatus) -> list[str]:
        groups = status.layout.groups if status.layout is not None else ()
        shape = sorted("+".join(member.worker_id for member in group.members) for group in groups)
        if str(shape) != self._seen:
            self._seen = str(shape)
            self.found.story.append(f"{time.monotonic() - self._began_s:6.1f} s  {' '.join(shape) or '(no group)'}")
        return shape

    async def _watch_for(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._shape(await self._client.status())
            await asyncio.sleep(min(0.1, max(0.0, until_s - time.monotonic())))

    async def _recover(self, living: Sequence[str], event_s: float) -> None:
        """Every living worker is in the layout, nobody else is, and answers come."""
        while (passed_s := time.monotonic() - event_s) < 6 * RECOVERY_S:
            placed = [name for group in self._shape(await self._client.status()) for name in group.split("+")]
            if sorted(placed) == sorted(living):
                with contextlib.suppress(BallastError, TimeoutError):
                    async with asyncio.timeout(LIMIT_S):
                        await self._answer(0)
                        self.found.recovered_s = time.monotonic() - event_s
                        return
            await asyncio.sleep(0.05)
        self.found.story.append(f"{time.monotonic() - self._began_s:6.1f} s  not recovered after {passed_s:.0f} s")

    async def _succeeds(self, drop: Sequence[str] | None) -> bool:
        try:
            await self._change(drop)
        except (BallastError, grpc.aio.AioRpcError, TimeoutError) as error:
            self.found.story.append(f"{'restore' if drop is None else 'drop'}: {error}")
            return False
        return True

    async def _change(self, drop: Sequence[str] | None, until: str = "done") -> bool:
        """Carries a drop or a restore out, until it is seen in a stage: False if that was not seen, and it is done.

        Raises:
            TimeoutError: it has not succeeded in time.
        """
        async with asyncio.timeout(_CHANGE_S):
            while True:
                request_id = uuid.uuid4().hex
                if drop is None and not any("+" in group for group in self._shape(await self._client.status())):
                    return until == "done"  # its members left the pair by themselves meanwhile
                try:
                    if drop is None:
                        begun = await self._planner.Restore(pb.RestoreRequest(request_id=request_id), timeout=_CHANGE_S)
                    else:
                        request = pb.DropRequest(worker_ids=drop, request_id=request_id)
                        begun = await self._planner.Drop(request, timeout=_CHANGE_S)
                except grpc.aio.AioRpcError as error:  # another change is under way, a member is lost
                    self.found.story.append(f"{time.monotonic() - self._began_s:6.1f} s  {error.details()}")
                    await asyncio.sleep(0.5)
                    continue
                if (seen := await self._seen_in(begun.epoch, until)) != "aborted":
                    return seen == until

    async def _seen_in(self, epoch: int, stage: str) -> str:
        """The stage, or the one in which the change has ended."""
        while True:
            listed = (await self._planner.ListTransitions(pb.ListTransitionsRequest(), timeout=_CHANGE_S)).transitions
            found = next((one for one in listed if one.epoch == epoch), None)
            if found is not None and found.phase in (stage, "done", "aborted"):
                return found.phase
            await asyncio.sleep(0.05 if stage == "done" else 0.0)


async def run_case(case: Case, model: Path, logs: Path) -> Found:
    pauses = case.fault in ("pause", "kill")
    lost, links = case.fault.removeprefix("links-"), case.fault in _LINKS
    hole = None if pauses else Hole(case.victim_number, lost, links=links)
    cluster = (LocalCluster if pauses else HoledCluster)(
        model,
        workers=case.workers,
        device_memory_bytes=16 << 20,
        flags={"planner": ["--overload-policy", "recompute"], "worker": ["--dtype", "float64"]},
        log_dir=logs,
        stop_timeout_s=2.0,
    )
    async with cluster:
        try:
            return await Scene(cluster, case, hole).run()
        finally:
            if hole is not None:
                hole.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, nargs="+", default=[2, 4, 6, 9, 12, 20, 60, math.inf])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--faults", nargs="+", choices=_FAULTS, default=["pause"])
    parser.add_argument("--victims", nargs="+", choices=("leader", "stage"), default=["leader", "stage"])
    parser.add_argument("--changes", nargs="+", choices=("drop", "restore"), default=["drop", "restore"])
    parser.add_argument("--stages", nargs="+", choices=_STAGES, default=list(_STAGES))
    parser.add_argument("--load", choices=("idle", "load", "both"), default="both")
    parser.add_argument("--logs", type=Path, default=Path("out/pauses"))
    args = parser.parse_args()
    loads = {"idle": (False,), "load": (True,), "both": (False, True)}[args.load]
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny("llama", Path(folder) / "tiny", max_len=512)
        moments = [*itertools.product(args.changes, args.stages)]
        cases = [
            Case(*of, *moment)
            for of in itertools.product(args.faults, args.victims, args.seconds, args.workers, loads)
            for moment in (moments if of[0] == "kill" else [("", "")])
        ]
        for number, case in enumerate(cases):
            logs = args.logs / str(number)
            try:
                found = asyncio.run(run_case(case, model, logs))
            except ConfigError as error:
                parser.error(str(error))
            except TimeoutError as error:  # the other cases go on
                failures += 1
                print(f"FAILED {case}: {error or 'a change before the fault did not end in time'}", flush=True)
                continue
            why = found.why_not()
            failures += bool(why)
            answers = f"{found.right} right, {found.wrong} wrong, {len(found.failed)} failed"
            times = f"recovered {found.recovered_s:5.1f} s, slowest {found.slowest_s:5.1f} s"
            print(f"{'FAILED' if why else 'ok    '} {case}: {times}, {answers}", flush=True)
            for line in [why, *found.story, f"logs: {logs}"] if why else ():
                print(f"         {line}", flush=True)
    print(f"{failures} cases failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
