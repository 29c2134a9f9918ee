"""The state of a cluster for the page: the dispatchers' statuses, the planner's transitions and a short history."""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc

from ballast.client import AsyncClient, ClusterStatus, RecentTimes, WorkerStatus
from ballast.client.access import Access
from ballast.common.errors import BallastError, Unauthenticated
from ballast.common.load import LoadReport
from ballast.rpc.codec import LOAD
from ballast.rpc.errors import from_rpc_error
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc

_FRESH_S: Final = 0.3  # how long a snapshot is reused
_ASK_TIMEOUT_S: Final = 2.0
_ORDER_TIMEOUT_S: Final = 15.0
_FOLLOWER_TIMEOUT_S: Final = 0.5
_HISTORY_COUNT: Final = 240
_LINE_COUNT: Final = 40
_RATE_OVER_S: Final = 2.0
_MIB: Final = 1 << 20

Json = dict[str, Any]  # Any: values for the json module


@dataclass(frozen=True, slots=True)
class Line:
    """An event in the page's list. `at_s`: wall-clock time."""

    at_s: float
    kind: str  # drop, restore or process
    text: str


@dataclass(frozen=True, slots=True)
class _HistoryPoint:
    at_s: float
    slowest_s: float
    tpot_s: float
    tokens_per_s: float
    waiting: int


class Watched:
    """The state of one cluster, polled at a limited rate, however often `snapshot` is called.

    Args:
        address: Addresses of the dispatchers.
        title: The cluster's name on the page.
        policy: The overload policy; empty if unknown.
        process_lines: Returns events of the cluster's processes, if they run on this machine.
        worker_ids: Returns all workers that should run, if they run on this machine.
        access: Credentials for the cluster; None: those of the environment.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        title: str = "",
        policy: str = "",
        process_lines: Callable[[], Iterable[Line]] = tuple,
        worker_ids: Callable[[], Iterable[str]] = tuple,
        access: Access | None = None,
    ) -> None:
        self._access = access if access is not None else Access.of()
        self.client = AsyncClient(
            address,
            connect_timeout_s=_ASK_TIMEOUT_S,
            call_timeout_s=_ORDER_TIMEOUT_S,
            token=self._access.token,
            ca_file=self._access.ca_file,
            tls=self._access.tls,
        )
        self.title, self.policy = title, policy
        self.capacity_tokens = 0  # KV capacity without drops; 0 until seen
        self._process_lines, self._worker_ids = process_lines, worker_ids
        self._lock = asyncio.Lock()
        self._shown: Json = {}
        self._evaluated_at_s = 0.0
        self._demands_tokens, self._learnt_at_s = False, -math.inf
        self._history: deque[_HistoryPoint] = deque(maxlen=_HISTORY_COUNT)
        self._totals: deque[tuple[float, int]] = deque(maxlen=64)  # (time, tokens so far)
        self._begun: dict[int, float] = {}  # epoch of a transition -> its start, as computed when first seen

    async def close(self) -> None:
        await self.client.close()

    async def snapshot(self) -> Json:
        async with self._lock:
            if time.monotonic() - self._evaluated_at_s > _FRESH_S:
                self._shown = await self._look()
                self._evaluated_at_s = time.monotonic()
        return self._shown

    async def demands_tokens(self, asked_within_s: float = math.inf) -> bool:
        """Whether dispatchers refuse orders without a token; False while none of them answers.

        Args:
            asked_within_s: Maximum age of a cached answer.
        """
        if time.monotonic() - self._learnt_at_s > asked_within_s or self._learnt_at_s == -math.inf:
            try:
                await self._transitions(token="")
                self._demands_tokens = False
            except Unauthenticated:
                self._demands_tokens = True
            except BallastError:
                return False
            self._learnt_at_s = time.monotonic()
        return self._demands_tokens

    async def drop(self, token: str | None = None) -> str:
        """Merge the first two workers that serve alone, regardless of demand. Returns a description of the drop.

        Args:
            token: Token of the caller; None: this process's credentials are used.
        """
        if token is not None:
            await self._transitions(token)  # raises at once for a caller without the right
        groups = [group for group in (await self.client.status()).groups if len(group.members) == 1]
        if len(groups) < 2:
            return "nothing to merge: at least two workers must serve alone"
        names = [str(group.leader_id) for group in groups[:2]]
        request = planner_pb2.DropRequest(worker_ids=names, request_id=_new_id())
        await self._order(lambda planner: planner.Drop(request, timeout=_ORDER_TIMEOUT_S), token)
        return f"{names[0]} and {names[1]} throw half of their parameters overboard"

    async def restore(self, token: str | None = None) -> str:
        """Restore all parameters; see `drop`."""
        request = planner_pb2.RestoreRequest(request_id=_new_id())
        await self._order(lambda planner: planner.Restore(request, timeout=_ORDER_TIMEOUT_S), token)
        return "all parameters come back"

    async def _transitions(self, token: str | None = None) -> Sequence[planner_pb2.Transition]:
        request = planner_pb2.ListTransitionsRequest()
        answer = await self._order(lambda planner: planner.ListTransitions(request, timeout=_ASK_TIMEOUT_S), token)
        return answer.transitions

    # Any: calls have different responses
    async def _order(self, ask: Callable[[Any], Any], token: str | None = None) -> Any:
        """Call the planner. `token`: the token to send; "": none; None: that of this process."""
        address = self.client.addresses[0]
        access = self._access if token is None else replace(self._access, token=token or None)
        async with access.open(address) as channel:
            try:
                return await ask(planner_pb2_grpc.PlannerServiceStub(access.bearing(channel)))
            except grpc.RpcError as error:
                raise from_rpc_error(error, address) from error

    async def _look(self) -> Json:
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                statuses = await self._statuses()
        except (BallastError, TimeoutError) as error:
            return {**self._shown, "title": self.title, "policy": self.policy, "error": str(error) or "no answer"}
        status = statuses[0]
        loads = await _follower_loads(status, self._access)
        now_s = time.time()
        times = [one.recent for one in statuses]
        self._add_point(now_s, statuses, times)
        if status.groups and all(len(group.members) == 1 for group in status.groups):
            self.capacity_tokens = sum(group.capacity_tokens for group in status.groups)
        return {
            "title": self.title,
            "policy": self.policy,
            "error": None,
            "model": status.model.name if status.model is not None else "",
            "layer_count": status.layout.layer_count if status.layout is not None else 0,
            "workers": self._workers(status, loads),
            "waiting": _waiting(statuses),
            "running": sum(group.load.running_count for group in status.groups if group.load is not None),
            "capacity_tokens": sum(group.capacity_tokens for group in status.groups),
            "endings": _sums(one.requests_total for one in statuses),
            "replays": sum(one.replays_total for one in times),
            "ttft_p50_s": max(one.ttft_p50_s for one in times),
            "points": [
                [round(p.at_s, 2), round(p.slowest_s, 4), round(p.tpot_s, 5), round(p.tokens_per_s, 1), p.waiting]
                for p in self._history
            ],
            "lines": await self._lines(now_s),
        }

    async def _statuses(self) -> list[ClusterStatus]:
        """The statuses of all dispatchers that answer. Raises the first one's error if none does."""
        answers = await asyncio.gather(
            *(self.client.status(address) for address in self.client.addresses), return_exceptions=True
        )
        found = [answer for answer in answers if isinstance(answer, ClusterStatus)]
        if not found:
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        return found

    def _add_point(self, now_s: float, statuses: Sequence[ClusterStatus], times: Sequence[RecentTimes]) -> None:
        total = sum(one.generated_tokens_total for one in times)
        if self._totals and total < self._totals[-1][1]:  # a dispatcher has restarted
            self._totals.clear()
        self._totals.append((now_s, total))
        then_s, before = next(
            (pair for pair in reversed(self._totals) if now_s - pair[0] >= _RATE_OVER_S), self._totals[0]
        )
        rate = (total - before) / (now_s - then_s) if now_s > then_s else 0.0
        slowest_s = max(max(one.ttft_p99_s, one.longest_wait_s) for one in times)
        tpot_s = max(one.tpot_p50_s for one in times)
        self._history.append(_HistoryPoint(now_s, slowest_s, tpot_s, rate, _waiting(statuses)))

    def _workers(self, status: ClusterStatus, loads: dict[str, LoadReport]) -> list[Json]:
        layer_count = status.layout.layer_count if status.layout is not None else 0
        shown: dict[str, Json] = {name: {"id": name, "down": True} for name in self._worker_ids()}
        for group in status.groups:
            for member, worker in zip(group.members, group.workers, strict=True):
                own = worker.load if worker is not None and worker.load is not None else None
                load = own or loads.get(member.worker_id)
                memory = load.memory if load is not None else None
                lead = group.load
                shown[member.worker_id] = {
                    "id": member.worker_id,
                    "down": worker is None or not worker.connected,
                    "group": [str(m.worker_id) for m in group.members],
                    "first_layer": member.first_layer,
                    "last_layer": member.last_layer,
                    "layer_count": layer_count,
                    "budget": memory.budget_bytes if memory else 0,
                    "parameters": memory.parameter_bytes if memory else 0,
                    "kv": memory.kv_bytes if memory else 0,
                    "used": lead.kv_usage_fraction if lead is not None else 0.0,
                    "retained": lead.retained_fraction if lead is not None else 0.0,
                    "running": lead.running_count if lead is not None else 0,
                    "waiting": lead.waiting_count if lead is not None else 0,
                    "draining": member.draining,
                    "standing": member.standing,
                }
        return [shown[name] for name in sorted(shown, key=_by_number)]

    async def _lines(self, now_s: float) -> list[Json]:
        lines = list(self._process_lines())
        with contextlib.suppress(BallastError):
            lines += [
                Line(self._begun.setdefault(one.epoch, now_s - one.age_s), one.kind, describe(one))
                for one in await self._transitions()
            ]
        lines.sort(key=lambda line: -line.at_s)
        return [{"at_s": line.at_s, "kind": line.kind, "text": line.text} for line in lines[:_LINE_COUNT]]


def describe(one: planner_pb2.Transition) -> str:
    """A drop or a restore in one line."""
    if one.phase not in ("done", "aborted"):
        return f"{one.kind} under way: {one.phase}"
    if one.phase == "aborted":
        return f"{one.kind} taken back ({one.reason})"
    took_s = one.prepare_s + one.commit_s + one.exchange_s
    moved = ""
    if one.victim_count:
        moved = f"; {one.victim_count} running requests moved, the longest pause {1000 * one.max_stall_s:.0f} ms"
    if one.kind == "drop":
        what = f"{_size(one.freed_parameter_bytes)} of parameters overboard"
    else:
        pulled = one.parameter_bytes_pulled  # 0 if loaded from the checkpoint because no member has them any more
        what = f"{_size(pulled)} of parameters back on board" if pulled else "the parameters back on board"
    return f"{what} in {took_s:.2f} s{moved}"


def _size(number: int) -> str:
    return f"{number / (_MIB << 10):.1f} GiB" if number >= _MIB << 10 else f"{number / _MIB:.1f} MiB"


async def _follower_loads(status: ClusterStatus, access: Access) -> dict[str, LoadReport]:
    """Load reports of followers, which do not report to dispatchers and are therefore queried directly."""
    leaders = {group.leader_id for group in status.groups}
    asked = [worker for worker in status.workers if worker.load is None and worker.worker_id not in leaders]
    answers = await asyncio.gather(*(_ask_load(worker, access) for worker in asked), return_exceptions=True)
    return {worker.worker_id: load for worker, load in zip(asked, answers, strict=True) if isinstance(load, LoadReport)}


async def _ask_load(worker: WorkerStatus, access: Access) -> LoadReport:
    async with access.open_peer(worker.address, "worker") as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        answer = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_FOLLOWER_TIMEOUT_S)
    return LOAD.record(answer.load)


def _waiting(statuses: Sequence[ClusterStatus]) -> int:
    at_workers = sum(group.load.waiting_count for group in statuses[0].groups if group.load is not None)
    return at_workers + sum(status.backlog_request_count for status in statuses)


def _sums(totals: Iterable[Any]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for total in totals:
        for ending, count in total.items():
            sums[ending] = sums.get(ending, 0) + count
    return sums


def _by_number(name: str) -> tuple[str, int]:
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (name, 0)


def _new_id() -> str:
    return f"dashboard-{time.time_ns():x}"
