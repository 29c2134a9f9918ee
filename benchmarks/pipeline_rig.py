"""A pipeline of real workers, each a process with one engine thread, for benchmarks: the rig is their planner.

Stages execute their layers, or sleep for as long as another machine would take, by its data sheet: then more of them
than there are cores overlap, and everything else (scheduler, wire, links, threads) is as it is.
"""

import asyncio
import csv
import functools
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from ballast.common.ids import Epoch, GroupId, Incarnation, RequestId, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.sampling import SamplingParams
from ballast.common.transition import Phase, TransitionKind
from services.worker.core.batch import Batch, StepResult
from services.worker.core.events import SequenceKey, Submitted
from services.worker.core.limits import WorkerLimits
from services.worker.core.plan import Plan
from services.worker.core.transition_messages import CommitRequested
from services.worker.emulation.machine import Machine
from services.worker.engine.load import load_engine
from services.worker.links.config import TransportConfig
from services.worker.pipeline.build import join, stage_core
from services.worker.pipeline.events import PlanReceived, Told
from services.worker.pipeline.stage_clock import Span, StageTimes
from services.worker.policy.cost import CostModel
from services.worker.policy.lookahead import lookahead
from services.worker.policy.microbatching import Microbatching, PipelineView, Share, by_token_count
from services.worker.policy.online_cost import OnlineCost
from services.worker.shell import WorkerShell
from services.worker.text import load_tokenizer, primed_detokenizer

_PATIENCE_S = 600.0
TOKEN_COUNT, TOKEN_COUNT_AHEAD, LOOKAHEAD = "token-count", "token-count, one ahead", "lookahead"
# Either policy with as many microbatches in flight as stages, or one more while requests wait. What servers do is the
# first; lookahead as it is serves is the last.
MODES = (TOKEN_COUNT, TOKEN_COUNT_AHEAD, "lookahead, none ahead", LOOKAHEAD)
_SPANS = 100_000


@dataclass(frozen=True, kw_only=True)
class RigSpec:
    model_dir: Path
    layer_count: int
    stage_count: int
    memory_bytes: int
    max_running_count: int
    max_batch_tokens: int
    block_tokens: int = 16
    emulated: Machine | None = None  # whose times stages take; None: they execute
    jitter: float = 0.0  # emulated stages take up to this part more or less


class ThreadTimes(NamedTuple):
    """Of one worker's process, in seconds since its start."""

    engine_s: float  # of a processor
    others_s: float  # of a processor, all other threads
    engine_waits_s: float  # the engine's thread could have run, and another had the core


@dataclass(frozen=True)
class Served:
    """What the leader saw of one run; seconds from the first submission."""

    wall_s: float
    first_token_s: tuple[float, ...]
    began_at_s: float  # by the clock that all processes of a machine share
    backlog_s: float  # until the last request was let in
    token_count: int  # prompts and answers
    model: CostModel | None  # what lookahead went by


def policies(model: Callable[[], CostModel | None]) -> dict[str, Microbatching]:
    """By mode."""
    every = by_token_count, Microbatching(_by_token_count_ahead, ahead=1), lookahead(model, ahead=0), lookahead(model)
    return dict(zip(MODES, every, strict=True))


def _by_token_count_ahead(view: PipelineView) -> Share:
    """Equal shares of one microbatch more, while requests wait and it may be in flight."""
    return by_token_count(view._replace(stage_count=view.stage_count + 1) if view.waiting_count else view)


class Emulated:
    """A `StageEngine` that computes nothing. Its hidden states have the size of the model's."""

    def __init__(self, machine: Machine, layer_count: int, hidden: int, jitter: float) -> None:
        self._execution = machine.execution
        self._machine_layers = machine.model.layer_count // layer_count  # for each layer here
        self._layer_count = layer_count
        self._hidden = hidden
        self._jitter = jitter

    def run_stage(
        self,
        batch: Batch,
        block_tables: Sequence[Sequence[int]],
        hidden_TD: torch.Tensor | None,
        *,
        first_layer: int,
        last_layer: int,
    ) -> StepResult | torch.Tensor:
        began_s = time.monotonic()
        layers, is_last = (last_layer - first_layer) * self._machine_layers, last_layer == self._layer_count
        took_s = self._execution.stage_s(batch.slices, layers, is_first=first_layer == 0, is_last=is_last)
        took_s *= 1 + self._jitter * ((batch.step_id * 2654435761 + first_layer * 40503) % 2001 / 1000 - 1)
        tokens = sum(len(s.token_ids) for s in batch.slices)
        time.sleep(max(0.0, began_s + took_s - time.monotonic()))
        if not is_last:
            return torch.zeros(tokens, self._hidden)
        samples = sum(s.samples for s in batch.slices)
        return StepResult(batch.step_id, (7,) * samples, (None,) * samples, took_s)

    def forget_all(self) -> None:
        pass


class _Stage:
    """One worker, in a process of its own."""

    def __init__(self, index: int, spec: RigSpec) -> None:
        torch.set_num_threads(1)
        self._spec = spec
        self._costs = OnlineCost()
        self._mode = TOKEN_COUNT
        self._policies = policies(self._model)
        self.engine = load_engine(spec.model_dir, device_memory_bytes=spec.memory_bytes, block_tokens=spec.block_tokens)
        info = self.engine.info
        limits = WorkerLimits(
            block_tokens=spec.block_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            max_running_count=spec.max_running_count,
            max_batch_tokens=spec.max_batch_tokens,
            max_waiting_count=1 << 20,
            max_waiting_tokens=1 << 40,
        )
        self.core, book = stage_core(limits, self.engine, index + 1, Microbatching(self._form, ahead=1))
        self.shell = WorkerShell(
            core=self.core,
            engine=self.engine,
            detokenizer=functools.partial(primed_detokenizer, load_tokenizer(spec.model_dir)),
        )
        self.membership = join(
            self.shell,
            me=WorkerId(f"w{index}"),
            core=self.core,
            book=book,
            engine=self.engine,
            config=TransportConfig(),
            advertise_host="127.0.0.1",
            max_running_count=limits.max_running_count,
            costs=self._costs,
            runner=None
            if spec.emulated is None
            else Emulated(spec.emulated, spec.layer_count, self.engine.config.hidden_size, spec.jitter),
        )
        self.membership.member.published.clock.keep(_SPANS)

    def _model(self) -> CostModel | None:
        if (machine := self._spec.emulated) is not None:
            layers = machine.model.layer_count // self._spec.stage_count
            return machine.execution.cost_of(layers, is_first=True, is_last=False)
        return self._costs.current()

    def _form(self, view: PipelineView) -> Share:
        policy = self._policies[self._mode]
        return policy(view) if view.in_flight_count < view.stage_count + policy.ahead else []

    async def answer(self, what: str, given: Any) -> Any:  # Any: what goes over the pipe
        match what:
            case "address":
                return self.membership.plane.store_address
            case "post":
                self.shell.post_member(given)
                return None
            case "phase":
                progress = self.membership.member.progress.get(given)
                return None if progress is None else progress.phase
            case "times":
                return self.membership.member.published.clock.times
            case "threads":
                return _thread_times()
            case "spans":
                return self.membership.member.published.clock.spans()
            case "serve":
                self._mode, requests = given
                return await self._serve(requests)
            case _:
                raise ValueError(what)

    async def _serve(self, requests: Sequence[tuple[int, int]]) -> Served:
        stream = await self.shell.open_stream()
        began_s = time.monotonic()
        first_s: dict[int, float] = {}
        left = set(range(1, len(requests) + 1))
        waited_s = began_s  # some request was waiting then

        async def submit() -> None:
            for handle, (prompt_tokens, output_tokens) in enumerate(requests, 1):
                await self.shell.post(
                    Submitted(
                        at_s=time.monotonic(),
                        key=SequenceKey(stream.stream_id, handle),
                        request_id=RequestId(f"r{stream.stream_id}-{handle}"),
                        attempt=1,
                        prompt_token_ids=tuple((handle * 31 + i * 7) % 400 + 16 for i in range(prompt_tokens)),
                        sampling=SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True),
                        wants_text=False,
                    )
                )

        submitting = asyncio.ensure_future(submit())
        async with asyncio.timeout(_PATIENCE_S):
            while left:
                output = await stream.next()
                assert output is not None
                if self.shell.load().waiting_count:
                    waited_s = time.monotonic()
                if output.emit is None:
                    continue
                now_s = time.monotonic() - began_s
                for handle in output.emit.handles:
                    first_s.setdefault(handle, now_s)
                for ending in output.emit.endings:
                    if ending.error or ending.refused:
                        raise RuntimeError(f"a request was not served: {ending}")
                    left.discard(ending.handle)
        wall_s = time.monotonic() - began_s
        await submitting
        self.shell.close_stream(stream)
        tokens = sum(p + o for p, o in requests)
        return Served(wall_s, tuple(first_s.values()), began_s, waited_s - began_s, tokens, self._model())


def _thread_times() -> ThreadTimes:
    """From the scheduler's own count, Linux only."""
    engine = next(thread.native_id for thread in threading.enumerate() if thread.name == "engine")
    ran_s, waited_s = {}, {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # it has ended
            ran_ns, waited_ns, _ = map(int, (task / "schedstat").read_text().split())
            ran_s[int(task.name)], waited_s[int(task.name)] = ran_ns / 1e9, waited_ns / 1e9
    return ThreadTimes(ran_s[engine], sum(ran_s.values()) - ran_s[engine], waited_s[engine])


async def _stage_main(index: int, spec: RigSpec, pipe: Connection) -> None:
    stage = _Stage(index, spec)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        engine = tasks.create_task(stage.shell.run())
        waiting: set[asyncio.Task[None]] = set()

        async def respond(number: int, what: str, given: Any) -> None:
            pipe.send((number, await stage.answer(what, given)))

        with suppress(EOFError):
            while (asked := await loop.run_in_executor(None, pipe.recv)) is not None:
                task = tasks.create_task(respond(*asked))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
        stage.shell.stop()
        await engine


def _stage_process(index: int, spec: RigSpec, pipe: Connection) -> None:
    asyncio.run(_stage_main(index, spec, pipe))


class Rig:
    """Use as a context manager: inside, the workers are one pipeline."""

    def __init__(self, spec: RigSpec) -> None:
        self._spec = spec
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []  # differs with the system
        self._processes: list[Any] = []  # of the context's own class
        for index in range(spec.stage_count):
            here, there = context.Pipe()
            process = context.Process(target=_stage_process, args=(index, spec, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        self._numbers = 0

    def __enter__(self) -> Self:
        try:
            self._merge()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()

    def _send(self, index: int, what: str, given: Any = None) -> int:
        self._numbers += 1
        self._pipes[index].send((self._numbers, what, given))
        return self._numbers

    def _receive(self, index: int, number: int) -> Any:
        if not self._pipes[index].poll(_PATIENCE_S):
            raise TimeoutError(f"stage {index} does not answer")
        got, answer = self._pipes[index].recv()
        assert got == number
        return answer

    def ask(self, index: int, what: str, given: Any = None) -> Any:
        return self._receive(index, self._send(index, what, given))

    def _ask_all(self, what: str, given: Any = None) -> list[Any]:
        numbers = [self._send(i, what, given) for i in range(self._spec.stage_count)]
        return [self._receive(i, number) for i, number in enumerate(numbers)]

    def serve(self, mode: str, requests: Sequence[tuple[int, int]]) -> tuple[Served, list[StageTimes]]:
        """All at once; with what each stage's time went to meanwhile."""
        before = self._ask_all("times")
        served = self.ask(0, "serve", (mode, requests))
        return served, [_since(a, b) for a, b in zip(before, self._ask_all("times"), strict=True)]

    def spans(self) -> list[list[Span]]:
        return self._ask_all("spans")

    def threads(self) -> list[ThreadTimes]:
        return self._ask_all("threads")

    def _merge(self) -> None:
        count, layers = self._spec.stage_count, self._spec.layer_count
        names = [WorkerId(f"w{i}") for i in range(count)]
        cuts = [layers * i // count for i in range(count + 1)]
        alone = tuple(Group(GroupId(n), (_member(n, 0, layers),)) for n in names)
        stages = tuple(_member(n, cuts[i], cuts[i + 1]) for i, n in enumerate(names))
        source = Layout(Epoch(1), layers, alone, "benchmark")
        target = Layout(Epoch(2), layers, (Group(GroupId("g"), stages),), "benchmark")
        addresses = dict(zip(names, self._ask_all("address"), strict=True))
        plan = PlanReceived(Plan(TransitionKind.DROP, source, target), addresses, {})
        self._ask_all("post", plan)
        self._await(Phase.PREPARED)
        self._ask_all("post", Told(target.epoch, CommitRequested(time.monotonic(), target.epoch)))
        self._await(Phase.DONE)

    def _await(self, phase: Phase) -> None:
        give_up_at_s = time.monotonic() + 60.0
        while set(phases := self._ask_all("phase", Epoch(2))) != {phase}:
            if time.monotonic() > give_up_at_s:
                raise TimeoutError(f"the workers have not come to {phase}: {phases}")
            time.sleep(0.01)


def _member(name: WorkerId, first: int, last: int) -> Member:
    return Member(name, Incarnation(1), "", first, last)


def _since(before: StageTimes, after: StageTimes) -> StageTimes:
    return StageTimes(
        after.busy_s - before.busy_s,
        after.idle_s - before.idle_s,
        after.network_s - before.network_s,
        after.send_s - before.send_s,
        after.steps - before.steps,
    )


def read_lengths(paths: Sequence[Path]) -> list[tuple[int, int]]:
    """(input, output) tokens of every row of CSV files with those columns; when requests arrive does not matter."""
    found: list[tuple[int, int]] = []
    for path in paths:
        with path.open(newline="") as file:
            found += [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return found
