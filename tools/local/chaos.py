"""Breaks a local cluster on purpose, under load, and checks that no request is lost and no token changes.

The tokens, text and logprobs of every answer are known beforehand. Faults are drawn at random from a seed, and several
may be active at a time. The keeper restarts processes that a fault has ended. After the last fault, the cluster has to
be whole: every worker is in the layout, a drop and a restore on request succeed, and no request runs or waits.
"""

import asyncio
import contextlib
import itertools
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

import grpc.aio

from ballast.client import AsyncClient, GenerationChunk
from ballast.client.types import Logprobs
from ballast.common.errors import BallastError
from ballast.common.sampling import Grammar, GrammarKind, SamplingParams
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from tools.local.cluster import LocalCluster
from tools.local.faults import BACK_WITHIN_S, Breaker, ClusterFault, Proxies
from tools.local.keeper import Keeper

_CHANGE_S = 60.0
_LONG_S = 5.0  # longer recovery times are printed
_LONGEST_WAIT_S = 20.0  # a request that waits longer for a token is a failure
_PROMPT_COUNT = 8
_LAYOUT_CHANGE_S = 6.0  # longest time between two requested drops or restores
_NOTED_S = 0.1  # shorter times without a token do not count as waits
_SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
_LOGPROB_ERROR = 1e-6  # tolerance, because a replay recomputes in a prefill what decodes computed first


def sampling_of(i: int, max_tokens: int, *, every_kind: bool) -> SamplingParams:
    """Sampling of the i-th request of the load: greedy or seeded; with `every_kind` some have logprobs, stop strings or
    a schema.
    """
    seeded = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=11 + i, ignore_eos=True)
    match i if every_kind else i % 2:
        case 2:
            return replace(seeded, logprobs=2, presence_penalty=0.5)
        case 3:  # the first string never appears, but often holds back text; the second may end the answer
            return replace(seeded, stop=("e\0", "zzz"))
        case 4:
            schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA))
            return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=i, grammar=schema)
        case 0 | 6:
            return replace(seeded, temperature=0.0)
        case _:
            return seeded


@dataclass(slots=True)
class ChaosAnswer:
    """What a client has received of an answer so far."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])

    def add(self, chunk: GenerationChunk) -> None:
        self.token_ids += chunk.token_ids
        self.text += chunk.text
        self.logprobs += chunk.logprobs

    def differs(self, expected: "ChaosAnswer", *, ended: bool) -> bool:
        """True unless this is the beginning of the expected answer (if `ended`, all of it)."""
        count = len(self.token_ids)
        whole = (self.token_ids, self.text) == (expected.token_ids, expected.text)
        begun = self.token_ids == expected.token_ids[:count] and expected.text.startswith(self.text)
        pairs = zip(self.logprobs, expected.logprobs, strict=False)
        close = all(abs(a.chosen.logprob - b.chosen.logprob) <= _LOGPROB_ERROR for a, b in pairs)
        return not (close and (whole if ended else begun))


@dataclass(frozen=True, slots=True)
class ChaosRules:
    """Parameters of a chaos run.

    Attributes:
        seconds: Duration of the faults.
        seed: Seed of all random choices.
        fault_every_s: Mean time between the starts of two faults.
        at_once: Maximum number of faults at a time.
        request_every_s: Mean time between two requests.
        max_tokens: Length of answers.
        faults: Names of the faults to inject; empty: all.
        every_kind: Some requests have logprobs, stop strings or a JSON schema.
    """

    seconds: float = 60.0
    seed: int = 0
    fault_every_s: float = 5.0
    at_once: int = 2
    request_every_s: float = 0.2
    max_tokens: int = 48
    faults: tuple[str, ...] = ()
    every_kind: bool = False


@dataclass(slots=True)
class Recovery:
    """Recovery from the faults of one kind, in seconds.

    Attributes:
        times_s: For each fault the time from its end until the cluster was whole again, with restarted processes.
        spans_s: For each fault its start, and the time when the cluster was whole again.
        waits_s: For each fault the longest wait of any request for a token within its span.
    """

    times_s: list[float] = field(default_factory=list[float])
    spans_s: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    waits_s: list[float] = field(default_factory=list[float])

    def add(self, began_s: float, healed_s: float, whole_s: float) -> None:
        self.times_s.append(whole_s - healed_s)
        self.spans_s.append((began_s, whole_s))

    def compare(self, waits: Sequence[tuple[float, float]]) -> None:
        """Set `waits_s` from the waits of requests, (begin, end) of each."""
        self.waits_s = [
            max((to_s - from_s for from_s, to_s in waits if from_s < whole_s and to_s > began_s), default=0.0)
            for began_s, whole_s in self.spans_s
        ]


def percentile(times_s: Sequence[float], share: float) -> float:
    ordered = sorted(times_s)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class ChaosReport:
    """The results of the load, and the final state of the cluster."""

    request_count: int = 0
    token_count: int = 0
    differing_count: int = 0  # answers, truncated ones included, that differ from the expected ones
    cut_off_count: int = 0  # answers that ended early because both dispatcher and state server were broken
    failures: Counter[str] = field(default_factory=Counter[str])  # number of other failed requests, by class of error
    slowest_s: float = 0.0
    recoveries: dict[str, Recovery] = field(default_factory=dict[str, Recovery])
    unhealed: str = ""  # why the cluster is not whole in the end
    ended_by_itself: list[str] = field(default_factory=list[str])  # processes that ended without a fault

    @property
    def lost_count(self) -> int:
        return sum(self.failures.values())

    def why_not(self, longest_wait_s: float = _LONGEST_WAIT_S) -> str:
        """The violated expectations as text; empty if there are none."""
        reasons = [
            f"{self.differing_count} answers differ" * (self.differing_count > 0),
            f"{self.lost_count} requests lost ({_counted(self.failures)})" * (self.lost_count > 0),
            f"a request took {self.slowest_s:.1f} s" * (self.slowest_s > longest_wait_s),
            f"not whole in the end: {self.unhealed}" * bool(self.unhealed),
            f"ended by itself: {', '.join(self.ended_by_itself)}" * bool(self.ended_by_itself),
        ]
        return "; ".join(reason for reason in reasons if reason)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


class Chaos:
    def __init__(
        self,
        cluster: LocalCluster,
        rules: ChaosRules,
        say: Callable[[str], None],
        proxies: Proxies | None = None,
        admin_url: str | None = None,
    ) -> None:
        """For `proxies` and `admin_url` see `Breaker`."""
        self._cluster = cluster
        self._rules = rules
        self._say = say
        self._rng = random.Random(rules.seed)
        self._breaker = Breaker(cluster, self._rng, say, proxies or Proxies(), admin_url)
        self._keeper = Keeper(cluster, lambda text: say(f"    {text}"))
        self._active: set[str] = set()  # faults in progress
        self._prompts = [[3 + (5 * i + 7 * j) % 200 for j in range(6 + 5 * i)] for i in range(_PROMPT_COUNT)]
        self._expected: list[ChaosAnswer] = []
        self._known_addresses: dict[str, str] = {}
        self._waits: list[tuple[float, float]] = []  # (begin, end) of waits of requests for a token
        self.report = ChaosReport()

    async def run(self) -> ChaosReport:
        keeping = asyncio.create_task(self._keeper.run(), name="keeper")
        try:
            async with self._client() as client:
                for i in range(_PROMPT_COUNT):
                    self._expected.append(ChaosAnswer())
                    async for chunk in client.stream(token_ids=self._prompts[i], sampling=self._sampling(i)):
                        self._expected[i].add(chunk)
            async with self._load():
                await self._break_things()
                self.report.unhealed = await self._why_not_whole()
            self.report.unhealed = self.report.unhealed or await self._why_not_idle()
        finally:
            self._breaker.let_go()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        self.report.ended_by_itself = self._ended_by_themselves()
        for recovery in self.report.recoveries.values():
            recovery.compare(self._waits)
        return self.report

    # ------------------------------------------------------------ load

    @property
    def _addresses(self) -> list[str]:
        """Addresses of all dispatchers, including those being restarted, which keep their addresses."""
        self._known_addresses |= {p.id: p.address for p in self._cluster.processes["dispatcher"] if p.address}
        return list(self._known_addresses.values())

    def _client(self, address: str | None = None, overload_retries: int = 0) -> AsyncClient:
        return AsyncClient(address or self._addresses, overload_retries=overload_retries, **self._cluster.credentials)

    def _sampling(self, i: int) -> SamplingParams:
        return sampling_of(i, self._rules.max_tokens, every_kind=self._rules.every_kind)

    @contextlib.asynccontextmanager
    async def _load(self) -> AsyncGenerator[None]:
        over = asyncio.Event()

        async def arrive() -> None:
            for number in itertools.count():
                if over.is_set():
                    return
                tasks.create_task(self._ask(number % _PROMPT_COUNT), name=f"request {number}")
                await asyncio.sleep(self._rng.expovariate(1 / self._rules.request_every_s))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(arrive(), name="arrivals")
            try:
                yield
            finally:
                over.set()

    async def _ask(self, i: int) -> None:
        """Send request `i` with a new client, as if from another user, and record how it ended."""
        report, began_s, answer, ended = self.report, time.monotonic(), ChaosAnswer(), False
        report.request_count += 1
        last_s = began_s
        try:
            async with self._client(overload_retries=3) as client:
                stream = client.stream(token_ids=self._prompts[i], sampling=self._sampling(i), deadline_s=60.0)
                async for chunk in stream:
                    answer.add(chunk)
                    last_s = self._note_wait(last_s)
                ended = True
        except BallastError as error:
            broken = self._breaker
            # Another dispatcher can continue a stream only if the state server still has its claim.
            if (
                answer.token_ids
                and _lately(broken.dispatchers_broken_s, began_s)
                and _lately(broken.state_broken_s, began_s)
            ):
                report.cut_off_count += 1
            else:
                report.failures[type(error).__name__] += 1
                self._say(f"    a request failed: {type(error).__name__}: {error}")
        self._note_wait(last_s)
        report.token_count += len(answer.token_ids)
        report.differing_count += answer.differs(self._expected[i], ended=ended)
        report.slowest_s = max(report.slowest_s, time.monotonic() - began_s)

    def _note_wait(self, since_s: float) -> float:
        """Record a wait that began at `since_s` and ends now. Returns the current time."""
        now_s = time.monotonic()
        if now_s - since_s > _NOTED_S:
            self._waits.append((since_s, now_s))
        return now_s

    # ------------------------------------------------------------ faults

    def faults(self) -> list[ClusterFault]:
        """The faults that the rules select."""
        chosen = self._rules.faults
        return [fault for fault in self._breaker.faults() if not chosen or fault.name in chosen]

    async def _break_things(self) -> None:
        rules, faults = self._rules, self.faults()
        until_s = time.monotonic() + rules.seconds
        async with asyncio.TaskGroup() as tasks:
            changing = tasks.create_task(self._change_layouts(), name="drops and restores")
            try:
                while time.monotonic() < until_s:
                    await asyncio.sleep(min(self._rng.expovariate(1 / rules.fault_every_s), rules.fault_every_s * 3))
                    if len(self._active) < rules.at_once:
                        fault = self._rng.choice(faults)
                        tasks.create_task(self._suffer(fault), name=fault.name)
            finally:
                changing.cancel()

    async def _suffer(self, fault: ClusterFault) -> None:
        began_s = time.monotonic()
        begun = await fault.begin()
        if begun is None:
            return
        what, lasts_s, heal = begun
        key = uuid.uuid4().hex
        self._active.add(key)
        self._say(f"{what}{f' for {lasts_s:g} s' if lasts_s else ''}")
        try:
            await asyncio.sleep(lasts_s)
            healed_s = time.monotonic()
            await heal()
        finally:
            self._active.discard(key)
        recovery = self.report.recoveries.setdefault(fault.name, Recovery())
        why = await self._why_not_placed(within_s=BACK_WITHIN_S)
        recovery.add(began_s, healed_s, time.monotonic())
        if recovery.times_s[-1] > _LONG_S:
            self._say(f"    {recovery.times_s[-1]:.1f} s after '{what}': {why or 'whole again'}")

    # ------------------------------------------------------------ layouts

    async def _change_layouts(self) -> None:
        """Request drops and restores continuously, because faults do the most damage during transitions. Ignores
        refusals.
        """
        while True:
            workers = [p.id for p in self._cluster.processes["worker"] if p.child.returncode is None and not p.paused]
            drop = self._rng.sample(workers, 2) if len(workers) > 1 and self._rng.random() < 0.6 else None
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError, BallastError):
                async with asyncio.timeout(_LAYOUT_CHANGE_S):
                    await self._begin_change(drop)
            await asyncio.sleep(self._rng.uniform(0.5, 1.0) * _LAYOUT_CHANGE_S)

    async def _begin_change(self, drop: Sequence[str] | None) -> int:
        """Request a drop that merges these workers; None: a restore. Returns its epoch."""
        async with self._planner() as planner:
            request_id = uuid.uuid4().hex
            if drop is None:
                begun = await planner.Restore(pb.RestoreRequest(request_id=request_id), timeout=_CHANGE_S)
                return begun.epoch
            request = pb.DropRequest(worker_ids=drop, request_id=request_id)
            return (await planner.Drop(request, timeout=_CHANGE_S)).epoch

    @contextlib.asynccontextmanager
    async def _planner(self) -> AsyncGenerator["planner_pb2_grpc.PlannerServiceAsyncStub"]:
        alive = [p for p in self._cluster.processes["dispatcher"] if p.child.returncode is None and not p.paused]
        addresses = [p.address for p in alive if p.address] or self._addresses
        access = self._cluster.access
        async with access.open(self._rng.choice(addresses)) as channel:
            yield planner_pb2_grpc.PlannerServiceStub(access.bearing(channel))

    # ------------------------------------------------------------ is it whole?

    async def _why_not_placed(self, within_s: float) -> str:
        """Wait until exactly the live workers are in the layout. Returns why they are not; empty if they are."""
        give_up_s, why = time.monotonic() + within_s, "not looked at"
        while time.monotonic() < give_up_s:
            alive = [p for p in self._cluster.processes["worker"] if p.child.returncode is None and not p.paused]
            running = {p.id for p in alive if p.address}  # the others are still starting
            with contextlib.suppress(BallastError, TimeoutError, grpc.aio.AioRpcError):
                async with asyncio.timeout(5.0), self._client() as client:
                    layout = (await client.status()).layout
                    groups = layout.groups if layout is not None else ()
                    placed = {member.worker_id for group in groups for member in group.members}
                    if running <= placed <= {p.id for p in alive}:
                        return ""
                    why = f"{sorted(placed)} are in the layout, {sorted(running)} run"
            await asyncio.sleep(0.1)
        return why

    async def _why_not_whole(self) -> str:
        why = await self._why_not_placed(BACK_WITHIN_S)
        if why:
            return why
        workers = [p.id for p in self._cluster.processes["worker"] if p.child.returncode is None and not p.paused]
        for drop in (None, workers[:2], None) if len(workers) > 1 else ():
            name = "a restore" if drop is None else "a drop"
            try:
                async with asyncio.timeout(_CHANGE_S):
                    await self._carry_out(drop)
            except TimeoutError:
                return f"{name} does not succeed within {_CHANGE_S:g} s"
        return ""

    async def _carry_out(self, drop: Sequence[str] | None) -> None:
        """Request a change until it succeeds. A restore that is refused because nothing is dropped counts as
        success.
        """
        while True:
            with contextlib.suppress(BallastError, grpc.aio.AioRpcError):
                try:
                    epoch = await self._begin_change(drop)
                except grpc.aio.AioRpcError as error:
                    if drop is None and await self._all_serve_alone():
                        return
                    self._say(f"    {'a restore' if drop is None else 'a drop'} is refused: {error.details()}")
                else:
                    if await self._phase_in_the_end(epoch) == "done":
                        return
            await asyncio.sleep(0.5)

    async def _all_serve_alone(self) -> bool:
        async with self._client() as client:
            layout = (await client.status()).layout
            return layout is not None and all(len(group.members) == 1 for group in layout.groups)

    async def _phase_in_the_end(self, epoch: int, *also: str) -> str:
        """Wait until a transition has ended or is in one of the phases `also`. Returns its phase; `forgotten` if the
        planner does not know it.
        """
        while True:
            async with self._planner() as planner:
                listed = (await planner.ListTransitions(pb.ListTransitionsRequest(), timeout=_CHANGE_S)).transitions
            found = next((one for one in listed if one.epoch == epoch), None)
            if found is None or found.phase in ("done", "aborted", *also):
                return found.phase if found is not None else "forgotten"
            await asyncio.sleep(0.0 if also else 0.05)

    async def _why_not_idle(self) -> str:
        """Wait until no request runs or waits and no block is held. Returns a description of the remaining work; empty
        if there is none.
        """
        give_up_s, left = time.monotonic() + BACK_WITHIN_S, "not looked at"
        while time.monotonic() < give_up_s:
            left = ""
            for address in self._addresses:
                try:
                    async with self._client(address) as client:
                        status = await client.status()
                except BallastError as error:
                    left = str(error)
                    continue
                loads = [group.load for group in status.groups if group.load is not None]
                held = sum(load.used_block_count for load in loads)
                running = status.running_request_count + sum(load.running_count + load.waiting_count for load in loads)
                if held or running or status.backlog_request_count:
                    left = f"{running} requests run, {status.backlog_request_count} wait, {held} blocks are held"
            if not left:
                return ""
            await asyncio.sleep(0.2)
        return left

    def _ended_by_themselves(self) -> list[str]:
        """The processes that ended because of a bug, without having been killed or stopped."""
        crash = self._cluster.crash()
        last = [] if crash is None else [f"{crash.target} at the very end"]
        return sorted({*self._keeper.ended_by_themselves, *last})


def _lately(times_s: Sequence[float], began_s: float) -> bool:
    return any(at_s >= began_s - 30.0 for at_s in times_s)
