"""Several workers in one process, with real engines, threads and links; the test acts as planner."""

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

from ballast.common.cost import CostModel
from ballast.common.errors import Unavailable
from ballast.common.ids import Epoch, GroupId, Incarnation, RequestId, WorkerId
from ballast.common.layout import Group, Layout, Member, group_of
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from ballast.common.transition import Phase, TransitionKind
from ballast.service.tokenizer import load_tokenizer
from services.worker.core.batch import IN_FLIGHT, Batch, LaunchedStep, NewSequence, TokenLogprobs
from services.worker.core.blocks import BlockBook
from services.worker.core.events import Aborted, BlockCopy, Emit, Ending, SequenceKey, Submitted
from services.worker.core.limits import WorkerLimits
from services.worker.core.plan import Plan
from services.worker.core.transition_messages import AbortRequested, CommitRequested
from services.worker.core.turns import MemberEvent
from services.worker.engine.load import Engine, load_engine
from services.worker.links.config import TransportConfig
from services.worker.memory.backend import MemoryBackend
from services.worker.memory.host_blocks import HostBlocks
from services.worker.output_stream import OutputStream
from services.worker.pipeline.activations import HostActivations
from services.worker.pipeline.build import BuiltMembership, join, stage_core
from services.worker.pipeline.context import Launch
from services.worker.pipeline.events import MigrationOrdered, PlanReceived, Told
from services.worker.pipeline.member import GroupMember
from services.worker.pipeline.progress import TransitionProgress
from services.worker.policy.harvest import Harvest
from services.worker.policy.lookahead import lookahead
from services.worker.ranks.channel import RankLog
from services.worker.ranks.load import load_ranked
from services.worker.ranks.nodes import Nodes, follow
from services.worker.shell import WorkerShell
from services.worker.text import primed_detokenizer
from tests.conftest import DEVICE
from tests.support import fake_driver
from tests.support.shells import until
from tools.local.ports import free_ports


def layout(epoch: int, groups: Sequence[Sequence[tuple[str, int, int]]], layer_count: int) -> Layout:
    """A layout. Each group is a list of (worker, first layer, last layer) in stage order."""
    made = tuple(
        Group(GroupId(g[0][0]), tuple(Member(WorkerId(w), Incarnation(1), "", first, last) for w, first, last in g))
        for g in groups
    )
    result = Layout(Epoch(epoch), layer_count, made, "test")
    result.check()
    return result


def alone(epoch: int, names: Sequence[str], layer_count: int) -> Layout:
    return layout(epoch, [[(name, 0, layer_count)] for name in names], layer_count)


@dataclass
class Answer:
    """The dispatcher's record of one request over all attempts."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    request_id: RequestId
    priority: PriorityClass = PriorityClass.DEFAULT
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str = ""
    attempts: int = 0
    token_at_s: list[float] = field(default_factory=list[float])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    matched_stop: str = ""
    deadline_at_s: float | None = None
    cancelled: bool = False
    place: tuple[str, int] | None = None  # worker and handle of the current attempt
    steps: list[str] = field(default_factory=list[str])

    @property
    def story(self) -> str:
        return f"{self.request_id} ({len(self.prompt)} tokens in): {'; '.join(self.steps)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device and dtype of workers, and how their tensors are transferred."""

    device: str = "cpu"
    dtype: str = "float64"
    backend: Callable[[], MemoryBackend] | None = None  # None: the device's own
    transport: str = "auto"
    ranks: int = 1  # per worker
    hosts: int = 1  # per worker: loopback addresses
    share: Callable[..., Engine] = load_engine  # loads one rank
    kv_cache_dtype: str = "auto"
    adapters: Mapping[str, Path] = field(default_factory=dict[str, Path])  # by name
    host_copy: str = "off"  # of the parameters, for all workers
    memory_factor: int = 1  # scales all sizes, since extents of a GPU have at least 2 MiB


def _gpu_like() -> MemoryBackend:
    driver = fake_driver.load()
    driver.set_granularity(2 << 20)
    driver.fail_at(None)
    return fake_driver.open_fake()


# Two workers on one GPU. NCCL refuses that, so links go through host memory.
ONE_GPU = Place(device="cuda", dtype="float32", transport="tcp", memory_factor=8)
# Selected by `pytest --device`. With `driver`, workers compute on the CPU in memory that is mapped through CUDA driver
# calls, with extents of a GPU's size.
PLACES = {"cpu": Place(), "driver": replace(ONE_GPU, device="cpu", dtype="float64", backend=_gpu_like), "cuda": ONE_GPU}
HERE = PLACES[os.environ.get(DEVICE, "cpu")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes and options of a cluster's workers. `transport` may differ between workers."""

    memory_bytes: int = 4 << 20
    max_running_count: int = 16
    max_batch_tokens: int = 64
    max_waiting_count: int = 64
    handover_timeout_s: float = 10.0
    swap_block_count: int = 0
    activation_log_bytes: int = 0
    prefix_caching: bool = False
    cost: CostModel | None = None  # if set, pipelines use it to form microbatches
    harvest: Harvest | None = None  # limits of offline work
    place: Place = HERE
    async_scheduling: bool = False  # for lone workers
    step_s: float = 0.0  # minimum duration of a step, so that requests do not end before the test acts
    transport: TransportConfig = field(default_factory=TransportConfig)


class Paced:
    """A model runner with a minimum step time. Any: all other attributes are the wrapped runner's."""

    def __init__(self, runner: Any, step_s: float) -> None:
        self._runner, self._step_s = runner, step_s

    def run_stage(self, *arguments: Any, **layers: Any) -> Any:
        time.sleep(self._step_s)
        return self._runner.run_stage(*arguments, **layers)

    def launch(self, *arguments: Any) -> Any:
        time.sleep(self._step_s)
        return self._runner.launch(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Copier(HostBlocks):
    """Counts the block copies made by pipeline stages."""

    in_pipelines = 0

    def start(self, copies: Sequence[BlockCopy], layers: Sequence[int]) -> None:
        self.in_pipelines += len(copies) if len(layers) < self._kv.shape.layer_count else 0
        super().start(copies, layers)


_FIRST_HOST = "127.0.0.2"


def _load(name: str, model_dir: Path, sizes: Sizes, stop: threading.Event) -> Engine:
    """Loads a worker's engine. `stop`: set to end the threads that stand in for other hosts."""
    place, memory_bytes = sizes.place, sizes.memory_bytes * sizes.place.memory_factor
    if place.ranks == 1:
        return load_engine(
            model_dir,
            device_memory_bytes=memory_bytes,
            dtype=place.dtype,
            device=place.device,
            backend=None if place.backend is None else place.backend(),
            lora_modules=place.adapters,
            host_copy=place.host_copy,
            kv_cache_dtype=place.kv_cache_dtype,
        )
    share = functools.partial(
        place.share, model_dir, device_memory_bytes=memory_bytes // place.ranks, dtype=place.dtype
    )
    if place.hosts == 1:
        return load_ranked(share, [place.device] * place.ranks, RankLog(name)).engine
    [port] = free_ports(1, _FIRST_HOST)
    nodes = Nodes(place.hosts, place.ranks, f"{_FIRST_HOST}:{port}", b"of all hosts")
    for number in range(1, place.hosts):
        far = replace(nodes, own_host=f"127.0.0.{number + 2}")
        devices = [place.device] * nodes.share
        threading.Thread(target=follow, args=(far, number, devices, model_dir, stop), daemon=True).start()
    return load_ranked(share, [place.device] * nodes.share, RankLog(name), nodes).engine


class GroupWorker:
    def __init__(self, name: str, model_dir: Path, ordinal: int, sizes: Sizes) -> None:
        self.name, self.model_dir = WorkerId(name), model_dir
        place = sizes.place
        self.model_dir = model_dir
        self.hosts_stop = threading.Event()
        self.engine = _load(name, model_dir, sizes, self.hosts_stop)
        self.steps_ahead = 0  # launched before all their tokens were known
        if sizes.async_scheduling:
            self.engine.runner.launch = functools.partial(self._launch, self.engine.runner.launch)
        info = self.engine.info
        limits = WorkerLimits(
            block_tokens=self.engine.block_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=frozenset(info.eos_token_ids),
            adapters=frozenset(adapter.name for adapter in info.adapters),
            max_running_count=sizes.max_running_count,
            max_batch_tokens=sizes.max_batch_tokens,
            max_waiting_count=sizes.max_waiting_count,
            handover_timeout_s=sizes.handover_timeout_s,
            swap_block_count=sizes.swap_block_count,
            swap_blocks_per_step=2,
            async_scheduling=sizes.async_scheduling,
            prefix_caching=sizes.prefix_caching,
        )
        microbatching = lookahead(lambda: sizes.cost)
        self.core, book = stage_core(limits, self.engine, ordinal, microbatching, harvest=sizes.harvest)
        self.shell = WorkerShell(
            core=self.core,
            engine=self.engine,
            detokenizer=functools.partial(primed_detokenizer, load_tokenizer(model_dir)),
            check_every_steps=1,
        )
        self.copier = Copier(self.engine.memory.kv, sizes.swap_block_count) if sizes.swap_block_count else None
        self.membership: BuiltMembership = join(
            self.shell,
            me=self.name,
            core=self.core,
            book=book,
            engine=self.engine,
            config=sizes.transport,
            transport=place.transport,
            advertise_host="127.0.0.1",
            copier=self.copier,
            compile_grammar=self.engine.grammars.ahead if self.engine.grammars is not None else None,
            activations=HostActivations(sizes.activation_log_bytes) if sizes.activation_log_bytes else None,
            runner=cast(Any, Paced(self.engine.runner, sizes.step_s)) if sizes.step_s else None,
        )

    def _launch(self, launch: Launch, batch: Batch, block_tables: Sequence[Sequence[int]]) -> LaunchedStep:
        self.steps_ahead += any(IN_FLIGHT in part.token_ids for part in batch.slices)
        return launch(batch, block_tables)

    @property
    def member(self) -> GroupMember:
        return self.membership.member

    @property
    def book(self) -> BlockBook:
        """The block book of the current group."""
        return self.member._context.book

    def progress(self, epoch: int) -> TransitionProgress | None:
        return self.member.progress.get(Epoch(epoch))


class Dispatcher:
    """One stream to each worker; follows `moved_to` like the real dispatcher, and retries elsewhere if refused."""

    def __init__(self, workers: dict[str, GroupWorker]) -> None:
        self._workers = workers
        model_dir = next(iter(workers.values())).model_dir
        self._detokenizer = functools.partial(primed_detokenizer, load_tokenizer(model_dir))
        self._streams: dict[str, OutputStream] = {}
        self._handles = count(1)
        self._live: dict[tuple[str, int], Answer] = {}
        self._done: dict[RequestId, asyncio.Event] = {}
        self._serial = count(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._placing: set[asyncio.Task[None]] = set()
        self.closed_streams = 0  # closed by workers

    async def attach(self) -> None:
        for name in self._workers:
            await self._open(name)

    async def _open(self, name: str) -> None:
        self._streams[name] = await self._workers[name].shell.open_stream()
        self._tasks[name] = asyncio.create_task(self._listen(name, self._streams[name]))

    async def submit(
        self,
        name: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        within_s: float | None = None,
        priority: PriorityClass = PriorityClass.DEFAULT,
    ) -> Answer:
        answer = Answer(tuple(prompt), sampling, RequestId(f"r{next(self._serial)}"), priority)
        answer.deadline_at_s = None if within_s is None else time.monotonic() + within_s
        self._done[answer.request_id] = asyncio.Event()
        await self._place(name, answer, follows=False)
        return answer

    async def end(self, answer: Answer) -> None:
        await self._done[answer.request_id].wait()

    async def cancel(self, answer: Answer) -> None:
        """Cancels a request, even while it moves between two workers."""
        answer.cancelled = True
        if answer.place is not None:
            name, handle = answer.place
            await self._workers[name].shell.post(Aborted(time.monotonic(), self._key(name, handle)))

    async def reattach(self, name: str) -> None:
        """Breaks the stream to a worker; its requests are replayed over a new one."""
        self._tasks[name].cancel()
        self._workers[name].shell.close_stream(self._streams[name])
        await self._open(name)
        await self._replay(name)

    async def _replay(self, name: str) -> None:
        for place in [place for place in self._live if place[0] == name]:
            await self._place(name, self._live.pop(place), follows=False)

    def _key(self, name: str, handle: int) -> SequenceKey:
        return SequenceKey(self._streams[name].stream_id, handle)

    async def _place(self, name: str, answer: Answer, *, follows: bool) -> None:
        handle = next(self._handles)
        answer.attempts += 1
        answer.place = (name, handle)
        answer.steps.append(f"{'moved' if follows else 'submitted'} to {name} with {len(answer.token_ids)} tokens")
        self._live[name, handle] = answer
        await self._workers[name].shell.post(
            Submitted(
                at_s=time.monotonic(),
                key=self._key(name, handle),
                request_id=answer.request_id,
                attempt=answer.attempts,
                prompt_token_ids=answer.prompt,
                sampling=answer.sampling,
                output_token_ids=tuple(answer.token_ids),
                output_text=self._text_of(answer),
                delivered_text_chars=len(answer.text),
                priority=answer.priority,
                deadline_at_s=answer.deadline_at_s,
                expects_handover=follows,
            )
        )
        if answer.cancelled:
            await self.cancel(answer)

    def _text_of(self, answer: Answer) -> str:
        """The answer's text as the worker's servicer detokenises it."""
        new = NewSequence(0, answer.prompt, (), answer.sampling)
        return "".join(map(self._detokenizer(new).push, answer.token_ids))

    async def _listen(self, name: str, stream: OutputStream) -> None:
        with contextlib.suppress(Unavailable):
            while (output := await stream.next()) is not None:
                if output.emit is not None:
                    self._take(name, output.emit)
                    for ending in output.emit.endings:
                        self._ended(name, ending)
        self.closed_streams += 1
        await self._open(name)
        await self._replay(name)

    def _take(self, name: str, emit: Emit) -> None:
        at, now_s = 0, time.monotonic()
        texts = emit.texts or ("",) * len(emit.handles)
        logprobs = iter(emit.logprobs)
        for handle, n, text in zip(emit.handles, emit.token_counts, texts, strict=True):
            answer = self._live[name, handle]
            answer.token_ids.extend(emit.token_ids[at : at + n])
            answer.token_at_s.extend([now_s] * n)
            answer.text += text
            if answer.sampling.logprobs is not None:
                answer.logprobs.extend(next(logprobs) for _ in range(n))
            at += n

    def _ended(self, name: str, ending: Ending) -> None:
        answer = self._live.pop((name, ending.handle))
        answer.place = None
        if ending.moved_to:
            self._later(self._place(ending.moved_to, answer, follows=True))
        elif ending.refused:
            self._later(self._try_elsewhere(answer))
        else:
            answer.finish_reason, answer.error = ending.finish_reason, ending.error
            answer.matched_stop = ending.matched_stop
            self._done[answer.request_id].set()

    async def _try_elsewhere(self, answer: Answer) -> None:
        others = sorted(self._workers)
        await asyncio.sleep(0.01)
        await self._place(others[answer.attempts % len(others)], answer, follows=False)

    def _later(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work` outside the listening task, which may end with its stream."""
        task = asyncio.get_running_loop().create_task(work)
        self._placing.add(task)
        task.add_done_callback(self._placing.discard)

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._placing]
        for task in tasks:
            task.cancel()
        for said in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(said, Exception):
                raise said


class Unprepared(AssertionError):
    """Members failed to prepare, with their reasons."""

    def __init__(self, why: dict[WorkerId, str]) -> None:
        super().__init__(str(why))
        self.why = why


class Cluster:
    """Workers and a dispatcher; the test acts as planner."""

    def __init__(self, workers: dict[str, GroupWorker], layer_count: int) -> None:
        self.workers = workers
        self.layer_count = layer_count
        self.in_force = alone(1, sorted(workers), layer_count)
        self.dispatcher = Dispatcher(workers)

    def post(self, name: str, event: MemberEvent) -> None:
        self.workers[name].shell.post_member(event)

    def members(self, target: Layout) -> list[WorkerId]:
        """Members of groups that the target changes."""
        kept = set(self.in_force.groups) & set(target.groups)
        return [m.worker_id for g in target.groups if g not in kept for m in g.members]

    def ask_to_prepare(self, kind: TransitionKind, target: Layout) -> list[WorkerId]:
        """Sends the plan once; a planner repeats this until members answer."""
        members = self.members(target)
        addresses = {WorkerId(n): w.membership.plane.store_address for n, w in self.workers.items()}
        holders = {m.worker_id: range(m.first_layer, m.last_layer) for g in self.in_force.groups for m in g.members}
        plan = Plan(kind, self.in_force, target)
        for name in members:
            own = holders.get(name, range(0))
            sources = {
                layer: tuple(sorted(w for w, held in holders.items() if layer in held))
                for layer in range(self.layer_count)
                if layer not in own
            }
            self.post(name, PlanReceived(plan, addresses, sources))
        return members

    async def prepare(self, kind: TransitionKind, target: Layout) -> Sequence[WorkerId]:
        """Returns the members once all are prepared."""
        members = self.ask_to_prepare(kind, target)
        async with asyncio.timeout(90.0):
            while any(self.workers[n].progress(target.epoch) is None for n in members):
                await asyncio.sleep(0.005)
                self.ask_to_prepare(kind, target)
        await self.until(members, target.epoch, Phase.PREPARED)
        return members

    def commit(self, members: Sequence[WorkerId], target: Layout) -> None:
        for name in members:
            self.post(name, Told(target.epoch, CommitRequested(time.monotonic(), target.epoch)))
        self.in_force = target

    async def change(self, kind: TransitionKind, target: Layout) -> dict[str, TransitionProgress]:
        members = await self.prepare(kind, target)
        self.commit(members, target)
        return await self.done(members, target.epoch)

    async def done(self, members: Sequence[WorkerId], epoch: Epoch) -> dict[str, TransitionProgress]:
        await self.until(members, epoch, Phase.DONE)
        found = {name: self.workers[name].progress(epoch) for name in members}
        return {name: progress for name, progress in found.items() if progress is not None}

    async def abort(self, members: Sequence[WorkerId], epoch: Epoch) -> None:
        """Aborts, and waits until all members that know the plan have undone it."""
        stale = {n: self.workers[n].member.published.stale_total for n in members}
        for name in members:
            self.post(name, Told(epoch, AbortRequested(time.monotonic(), epoch, "test")))

        def undone(name: WorkerId) -> bool:
            progress = self.workers[name].progress(epoch)
            if progress is None:
                return self.workers[name].member.published.stale_total > stale[name]
            return progress.phase is Phase.ABORTED

        await until(lambda: all(undone(name) for name in members))

    async def goes_on(self, answers: Sequence[Answer]) -> None:
        """Waits until each answer has a new token, or all its tokens, since a fast machine may have completed it."""
        counts = [len(answer.token_ids) for answer in answers]

        def more(answer: Answer, count: int) -> bool:
            return len(answer.token_ids) > count or len(answer.token_ids) == answer.sampling.max_tokens

        await until(lambda: all(more(a, n) for a, n in zip(answers, counts, strict=True)))

    async def until(self, members: Sequence[WorkerId], epoch: Epoch, phase: Phase) -> None:
        give_up_at_s = time.monotonic() + 90.0
        while True:
            said = {n: self.workers[n].progress(epoch) for n in members}
            if all(p is not None and p.phase is phase for p in said.values()):
                return
            failed = {n: p.why for n, p in said.items() if p and p.phase is Phase.FAILED}
            if failed:
                raise Unprepared(failed)
            if time.monotonic() > give_up_at_s:
                left = {n: _left(self.workers[n]) for n in members}
                raise AssertionError(f"epoch {epoch} is not {phase} everywhere: {left}")
            await asyncio.sleep(0.002)

    def migrate(
        self, source: str, target: str, block_budget: int = 1000, within_s: float = 0.5, epoch: int = 0
    ) -> None:
        """Sends a planner's migration order to all members of both groups, by default for the current layout."""
        groups = [group_of(self.in_force, WorkerId(name)) for name in (source, target)]
        if groups[0] == groups[1]:
            return
        leaders = [group.leader.worker_id for group in groups if group is not None]
        sides = [[m.worker_id for m in group.members] for group in groups if group is not None]
        until_s = time.monotonic() + within_s
        for names, others in (sides, sides[::-1]):
            peers = {peer: self.workers[peer].membership.plane.store_address for peer in others}
            order = MigrationOrdered(
                Epoch(epoch) or self.in_force.epoch, leaders[0], leaders[1], peers, block_budget, until_s, "test"
            )
            for name in names:
                self.post(name, order)

    def describe(self) -> dict[str, str]:
        return {name: _left(worker) for name, worker in self.workers.items()}

    async def quiet(self) -> None:
        """Waits until workers hold only retained blocks and no group dissolves."""
        try:
            await until(lambda: not any(_occupied(worker) for worker in self.workers.values()))
        except AssertionError as error:
            for name, worker in self.workers.items():
                error.add_note(f"{name}: {_left(worker)}")
            raise


def _occupied(worker: GroupWorker) -> bool:
    held_count = worker.book.used_count - len(worker.book.numbers)
    return bool(held_count or worker.core.kept_count or worker.member._driver.leaving)


def _left(worker: GroupWorker) -> str:
    ids, member, group = worker.book.sequence_ids, worker.member, worker.core.group_scheduler
    scheduler = group.scheduler
    driver, home = member._driver, member._layer_loading
    transition = driver.transition
    open_ = transition and (transition.state, vars(transition))
    return (
        f"{open_} undoing {driver.undoing} leaving {driver.leaving is not None}"
        f" may form {driver.may_form} granted {member._context.room._granted} links missing"
        f" {member._links.missing} pulls {home._pull and home._pull._under_way}, suspended {group.suspended_ids}"
        f", in flight {group.in_flight_count}, settled {group.settled}, not told {group.batches_in_flight.to_remove};"
        f" of {scheduler.block_count} blocks {scheduler.lent_block_count} lent, {scheduler.expected_block_count}"
        f" expected, {scheduler.reserved_block_count} reserved, {len(scheduler.swap.entries)} swapped; "
        f"leads {worker.member.leads}, blocks of {[(i >> 32, i & 0xFFFFFFFF) for i in ids]}, live"
        f" {worker.core.sequence_ids}, {worker.core.kept_count} kept, {list(worker.member.progress.values())[-1:]}"
    )


_PLAIN = Sizes()


@contextlib.asynccontextmanager
async def running_group(
    model_dir: Path, names: Sequence[str], sizes: Sizes = _PLAIN, within_s: float = 240.0, **own: Sizes
) -> AsyncGenerator[Cluster]:
    """Runs workers with these names until the block ends. `own`: sizes for individual workers."""
    workers = {name: GroupWorker(name, model_dir, i + 1, own.get(name, sizes)) for i, name in enumerate(names)}
    layer_count = next(iter(workers.values())).engine.info.layer_count
    cluster = Cluster(workers, layer_count)
    with contextlib.ExitStack() as hosts:
        for worker in workers.values():
            hosts.callback(worker.hosts_stop.set)
        async with asyncio.timeout(within_s), asyncio.TaskGroup() as tasks:
            for worker in workers.values():
                tasks.create_task(worker.shell.run())
            await cluster.dispatcher.attach()
            try:
                yield cluster
            finally:
                await cluster.dispatcher.close()
                for worker in workers.values():
                    worker.shell.stop()
