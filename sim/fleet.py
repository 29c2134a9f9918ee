"""Simulates the placement of requests on instances that start on demand and stop when empty, with the cost model.

Steps are combined into ticks, so an hour of twenty instances takes seconds. Service cores and delays are left out,
because this only compares placements and numbers of instances; `ballast sim` runs the cores.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

import numpy as np

from services.planner.policy import lean, mell
from sim.cost import SimRoofline
from sim.hardware import Cluster, ModelSpec, Timings
from sim.jobs.settled import capacity_tokens, prompt_s

_TICK_S = 0.25
_LOOK_TICKS = 2  # ticks between two rebalancing rounds of a placement: its epoch
_MARGIN_TOKENS = 24  # margin per request, for the growth until the next round
_MOST_RUNNING = 256
_UNEVEN = 0.2  # difference in memory use between the fullest and the emptiest instance that triggers balancing
_SETTLED = 0.2  # initial fraction of the run, left out of means


@dataclass(slots=True, eq=False)
class Job:
    """One request in progress."""

    number: int
    at_s: float
    prompt_tokens: int
    answer_tokens: int
    made_tokens: float = 0.0
    first_s: float | None = None
    stalled_until_s: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + int(self.made_tokens)


@dataclass(slots=True, eq=False)
class Node:
    """An instance."""

    number: int
    jobs: dict[int, Job] = field(default_factory=dict[int, Job])
    prompts: deque[list[float]] = field(default_factory=deque[list[float]])  # [job number, remaining prefill seconds]
    leaving: bool = False

    @property
    def used(self) -> int:
        return sum([job.tokens for job in self.jobs.values()])


class FleetPlacement(Protocol):
    def place(self, job: Job) -> Node: ...

    def ended(self, job: Job) -> None: ...

    def look(self) -> list[tuple[Job, Node]]:
        """Moves to make now: (job, target) pairs."""
        ...


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    mean_nodes: float
    most_nodes: int
    used: float  # mean fraction of the running instances' memory in use
    moves_per_s: float
    moved_bytes: float
    kv_share: float  # fraction of the moves that transferred KV
    recomputed_count: int
    ttft_p99_s: float
    series: tuple[tuple[float, int], ...]  # (seconds, number of instances)


class SimFleet:
    def __init__(
        self, model: ModelSpec, cluster: Cluster, timings: Timings, make: Callable[["SimFleet"], FleetPlacement]
    ) -> None:
        self.capacity = int(capacity_tokens(model, cluster, timings))
        self.nodes: dict[int, Node] = {}
        self._model, self._gpu = model, cluster.gpu
        self._costs = SimRoofline(model, cluster, timings).costs
        self._opened_count = 0
        self._placement = make(self)
        self._recomputed_count = self._moves = self._kv_moves = 0
        self._moved_bytes = 0.0

    # ------------------------------------------------------------ for placements

    def open(self) -> Node:
        node = self.nodes[self._opened_count] = Node(self._opened_count)
        self._opened_count += 1
        return node

    def free(self, node: Node) -> int:
        return self.capacity - node.used

    def with_room(self, tokens: int) -> list[Node]:
        return [node for node in self.nodes.values() if self.free(node) >= tokens and len(node.jobs) < _MOST_RUNNING]

    # ------------------------------------------------------------ running

    def run(self, jobs: Sequence[Job]) -> FleetOutcome:
        """Run until the last request has arrived."""
        coming, waiting, over = deque(jobs), deque[Job](), list[Job]()
        series: list[tuple[float, int]] = []
        used: list[float] = []
        tick, end_s = 0, jobs[-1].at_s
        while (now_s := tick * _TICK_S) <= end_s:
            while coming and coming[0].at_s <= now_s:
                waiting.append(coming.popleft())
            while waiting:
                self._add(waiting.popleft(), now_s)
            for node in list(self.nodes.values()):
                over += self._advance(node, now_s)
            if tick % _LOOK_TICKS == 0:
                for job, target in self._placement.look():
                    self._move(job, target, now_s)
            for node in self.nodes.values():
                waiting.extendleft(self._overflowing(node))
            self.nodes = {number: node for number, node in self.nodes.items() if node.jobs}
            if self.nodes:
                series.append((now_s, len(self.nodes)))
                used.append(sum(node.used for node in self.nodes.values()) / (self.capacity * len(self.nodes)))
            tick += 1
        late = int(_SETTLED * len(series))
        waits_s = [job.first_s - job.at_s for job in jobs if job.first_s is not None]
        return FleetOutcome(
            mean_nodes=fmean(count for _, count in series[late:]),
            most_nodes=max(count for _, count in series),
            used=fmean(used[late:]),
            moves_per_s=self._moves / end_s,
            moved_bytes=self._moved_bytes,
            kv_share=self._kv_moves / self._moves if self._moves else 0.0,
            recomputed_count=self._recomputed_count,
            ttft_p99_s=float(np.quantile(waits_s, 0.99)),
            series=tuple(series),
        )

    def _add(self, job: Job, now_s: float) -> None:
        node = self._placement.place(job)
        node.jobs[job.number] = job
        self._compute(node, job)

    def _compute(self, node: Node, job: Job) -> None:
        node.prompts.append([job.number, prompt_s(self._costs, self._model.layer_count, job.tokens)])

    def _advance(self, node: Node, now_s: float) -> list[Job]:
        """Advance a tick: prompts first, then steps of all others in the remaining time. Returns ended jobs."""
        left_s, computed = _TICK_S, {int(number) for number, _ in node.prompts}
        while node.prompts and left_s > 0.0:
            number, needed_s = node.prompts[0]
            took_s = min(needed_s, left_s)
            left_s -= took_s
            node.prompts[0][1] -= took_s
            if node.prompts[0][1] <= 1e-9:
                node.prompts.popleft()
                job = node.jobs.get(int(number))
                if job is not None and job.first_s is None:
                    job.first_s = now_s + _TICK_S - left_s
                    job.made_tokens += 1.0
        running = [job for job in node.jobs.values() if job.number not in computed and job.stalled_until_s <= now_s]
        if running and left_s > 0.0:
            step = self._costs.decodes(len(running), sum([job.tokens for job in running]))
            steps = left_s / step.on(self._model.layer_count, is_last=True)
            for job in running:
                job.made_tokens += steps
        ended = [job for job in node.jobs.values() if job.made_tokens >= job.answer_tokens]
        for job in ended:
            del node.jobs[job.number]
            self._placement.ended(job)
        return ended

    def _overflowing(self, node: Node) -> list[Job]:
        """Remove the newest jobs until the rest fits, and return them for recomputation."""
        out: list[Job] = []
        while node.used > self.capacity and len(node.jobs) > 1:
            job = max(node.jobs.values(), key=lambda job: (job.at_s, job.number))
            self._take_out(node, job)
            self._placement.ended(job)
            self._recomputed_count += 1
            out.append(job)
        return out

    @staticmethod
    def _take_out(node: Node, job: Job) -> None:
        del node.jobs[job.number]
        node.prompts = deque(prompt for prompt in node.prompts if int(prompt[0]) != job.number)

    def _move(self, job: Job, target: Node, now_s: float) -> None:
        """Move a job with its KV or by recomputation, whichever is faster. It makes no progress meanwhile."""
        source = next((node for node in self.nodes.values() if job.number in node.jobs), None)
        if source is None or source is target:
            return
        near = source.number // self._gpu.gpus_per_host == target.number // self._gpu.gpus_per_host
        link = self._gpu.scale_up_bytes_per_s if near else self._gpu.nic_bytes_per_s
        token_s = prompt_s(self._costs, self._model.layer_count, job.tokens) / job.tokens
        waits = any(int(number) == job.number for number, _ in source.prompts)
        self._take_out(source, job)
        target.jobs[job.number] = job
        self._moves += 1
        if not waits and mell.sends_kv(job.tokens, self._model.kv_bytes_per_token, link, token_s):
            self._kv_moves += 1
            self._moved_bytes += job.tokens * self._model.kv_bytes_per_token
            job.stalled_until_s = now_s + job.tokens * self._model.kv_bytes_per_token / link
        else:
            self._compute(target, job)


# ---------------------------------------------------------------- placements


class Fit:
    """Best or worst fit. `whole`: reserve memory for the whole answer, whose length is assumed to be known."""

    def __init__(self, fleet: SimFleet, *, best: bool, whole: bool = False, balances: bool = False) -> None:
        self._fleet, self._best, self._whole, self._balances = fleet, best, whole, balances

    def place(self, job: Job) -> Node:
        fleet, needed = self._fleet, job.tokens + 1
        rooms = {node.number: fleet.free(node) for node in fleet.with_room(needed)}
        if self._whole:
            needed = job.prompt_tokens + job.answer_tokens
            kept = {n: sum(j.prompt_tokens + j.answer_tokens for j in fleet.nodes[n].jobs.values()) for n in rooms}
            rooms = {n: fleet.capacity - amount for n, amount in kept.items() if fleet.capacity - amount >= needed}
        if not rooms:
            return fleet.open()
        chosen = (min if self._best else max)(rooms, key=lambda number: (rooms[number], number))
        return fleet.nodes[chosen]

    def ended(self, job: Job) -> None:
        pass

    def look(self) -> list[tuple[Job, Node]]:
        """Balance as in Llumnix: move one job from the fullest instance to the emptiest."""
        fleet = self._fleet
        if not self._balances or len(fleet.nodes) < 2:
            return []
        fullest, emptiest = (choose(fleet.nodes.values(), key=lambda n: (n.used, n.number)) for choose in (max, min))
        gap = fullest.used - emptiest.used
        fitting = [job for job in fullest.jobs.values() if 2 * job.tokens <= gap]
        if gap < _UNEVEN * fleet.capacity or not fitting:
            return []
        return [(max(fitting, key=lambda job: (job.tokens, job.number)), emptiest)]


class Freeness:
    """The dispatchers' rule: most free memory per request, the new one included."""

    def __init__(self, fleet: SimFleet) -> None:
        self._fleet = fleet

    def place(self, job: Job) -> Node:
        found = self._fleet.with_room(job.tokens + 1)
        if not found:
            return self._fleet.open()
        return max(found, key=lambda node: (self._fleet.free(node) / (len(node.jobs) + 1), -node.number))

    def ended(self, job: Job) -> None:
        pass

    def look(self) -> list[tuple[Job, Node]]:
        return []


class Lean:
    def __init__(self, fleet: SimFleet) -> None:
        self._fleet = fleet

    def _held(self) -> list[lean.HeldRequest]:
        return [
            lean.HeldRequest(node.number, tuple(job.tokens for job in node.jobs.values()), node.leaving)
            for node in self._fleet.nodes.values()
        ]

    def place(self, job: Job) -> Node:
        number = lean.place(job.tokens + 1, self._held(), self._fleet.capacity)
        node = self._fleet.open() if number is None else self._fleet.nodes[number]
        node.leaving = False
        return node

    def ended(self, job: Job) -> None:
        pass

    def look(self) -> list[tuple[Job, Node]]:
        held, capacity = self._held(), self._fleet.capacity
        moves = lean.relieve(held, capacity) or lean.leaves(held, capacity) or []
        taken: set[int] = set()
        found: list[tuple[Job, Node]] = []
        for move in moves:
            jobs = self._fleet.nodes[move.source].jobs.values()
            job = next(job for job in jobs if job.tokens == move.amount and job.number not in taken)
            taken.add(job.number)
            found.append((job, self._fleet.nodes[move.target]))
        return found


class Mell:
    """Placement by MELL. `batched`: the moves of an epoch are merged; otherwise those of every operation are made."""

    def __init__(self, fleet: SimFleet, *, repaired: bool, batched: bool = True) -> None:
        self._fleet, self._batched = fleet, batched
        self._book = mell.Book(fleet.capacity, repaired=repaired)
        self._nodes: dict[int, Node] = {}  # bin -> its instance
        self._jobs: dict[int, Job] = {}
        self._due: list[tuple[Job, Node]] = []

    def place(self, job: Job) -> Node:
        self._jobs[job.number] = job
        self._book.allocate(job.number, self._amount(job))
        self._operated()
        return self._node(self._book.bin_number(job.number))

    def ended(self, job: Job) -> None:
        del self._jobs[job.number]
        self._book.depart(job.number)
        self._operated()

    def look(self) -> list[tuple[Job, Node]]:
        for number, job in list(self._jobs.items()):
            self._book.update(number, self._amount(job))
            self._operated()
        due, self._due = self._due, []
        return due + self._taken()

    def _operated(self) -> None:
        if not self._batched:
            self._due += self._taken()

    def _amount(self, job: Job) -> int:
        return min(self._fleet.capacity, job.tokens + _MARGIN_TOKENS)

    def _taken(self) -> list[tuple[Job, Node]]:
        moves = self._book.take_moves()
        return [(self._jobs[int(str(move.request))], self._node(move.target)) for move in moves]

    def _node(self, number: int) -> Node:
        node = self._nodes.get(number)
        if node is None:
            node = self._nodes[number] = self._fleet.open()
        self._fleet.nodes[node.number] = node  # it may have been empty temporarily
        return node


PLACEMENTS: Mapping[str, Callable[[SimFleet], FleetPlacement]] = {
    "best-fit": lambda fleet: Fit(fleet, best=True),
    "worst-fit": lambda fleet: Fit(fleet, best=False),
    "best-fit-whole": lambda fleet: Fit(fleet, best=True, whole=True),
    "worst-fit-whole": lambda fleet: Fit(fleet, best=False, whole=True),
    "balance": lambda fleet: Fit(fleet, best=False, balances=True),
    "freeness": Freeness,
    "mell": lambda fleet: Mell(fleet, repaired=False),
    "mell-unbatched": lambda fleet: Mell(fleet, repaired=False, batched=False),
    "mell-repaired": lambda fleet: Mell(fleet, repaired=True),
    "lean": Lean,
}


def jobs_of(arrivals_s: Sequence[float], lengths: Callable[[], tuple[int, int]], capacity: int) -> list[Job]:
    """Jobs of a trace. Prompts and answers are shortened so that no job takes more than 85 % of an instance."""
    jobs: list[Job] = []
    for number, at_s in enumerate(arrivals_s):
        prompt, answer = lengths()
        most = math.floor(0.85 * capacity)
        if prompt + answer > most:
            prompt = min(prompt, most // 2)
            answer = min(answer, most - prompt)
        jobs.append(Job(number, at_s, max(1, prompt), max(1, answer)))
    return jobs
