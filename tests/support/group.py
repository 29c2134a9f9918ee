"""Several workers in one process, each with a real engine, its own thread and real links; the test is the planner."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from ballast.common.ids import Epoch, GroupId, Incarnation, RequestId, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.sampling import FinishReason, SamplingParams
from services.worker.core.events import SequenceKey, Submitted
from services.worker.core.limits import WorkerLimits
from services.worker.core.transition import AbortRequested, CommitRequested, Kind, Phase, Plan
from services.worker.engine.load import Engine, load_engine
from services.worker.pipeline.build import Membership, join, stage_core
from services.worker.pipeline.events import PlanReceived, Told
from services.worker.pipeline.status import Progress
from services.worker.shell import OutputStream, WorkerShell
from services.worker.text import load_tokenizer, primed_detokenizer
from services.worker.transport.config import TransportConfig


def layout(epoch: int, groups: Sequence[Sequence[tuple[str, int, int]]], layer_count: int) -> Layout:
    """Each group as (worker, first layer, last layer) in stage order."""
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
    """What a request's dispatcher has, over all attempts."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    request_id: RequestId
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str = ""
    attempts: int = 0
    token_at_s: list[float] = field(default_factory=list[float])


class GroupWorker:
    def __init__(self, name: str, model_dir: Path, ordinal: int, **given: object) -> None:
        memory_bytes = int(given.get("memory_bytes", 4 << 20))  # pyright: ignore[reportArgumentType]
        self.name = WorkerId(name)
        self.engine: Engine = load_engine(
            model_dir, device_memory_bytes=memory_bytes, dtype=str(given.get("dtype", "float64"))
        )
        info = self.engine.info
        limits = WorkerLimits(
            block_tokens=self.engine.block_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=frozenset(info.eos_token_ids),
            max_running_count=int(given.get("max_running_count", 16)),  # pyright: ignore[reportArgumentType]
            max_batch_tokens=int(given.get("max_batch_tokens", 64)),  # pyright: ignore[reportArgumentType]
        )
        self.core, self.book = stage_core(limits, self.engine, ordinal)
        self.shell = WorkerShell(
            core=self.core,
            engine=self.engine,
            detokenizer=functools.partial(primed_detokenizer, load_tokenizer(model_dir)),
            check_every_steps=1,
        )
        self.membership: Membership = join(
            self.shell,
            me=self.name,
            core=self.core,
            book=self.book,
            engine=self.engine,
            config=TransportConfig(),
            advertise_host="127.0.0.1",
            max_running_count=limits.max_running_count,
        )

    def progress(self, epoch: int) -> Progress | None:
        return self.membership.member.progress.get(Epoch(epoch))


class Dispatcher:
    """One stream to each worker; follows `moved_to` as the real one does."""

    def __init__(self, workers: dict[str, GroupWorker]) -> None:
        self._workers = workers
        self._streams: dict[str, OutputStream] = {}
        self._handles = count(1)
        self._live: dict[tuple[str, int], Answer] = {}
        self._done: dict[RequestId, asyncio.Event] = {}
        self._serial = count(1)
        self._tasks: list[asyncio.Task[None]] = []

    async def attach(self) -> None:
        for name, worker in self._workers.items():
            self._streams[name] = await worker.shell.open_stream()
            self._tasks.append(asyncio.create_task(self._listen(name)))

    async def submit(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        answer = Answer(tuple(prompt), sampling, RequestId(f"r{next(self._serial)}"))
        self._done[answer.request_id] = asyncio.Event()
        await self._place(name, answer, follows=False)
        return answer

    async def end(self, answer: Answer) -> None:
        await self._done[answer.request_id].wait()

    async def _place(self, name: str, answer: Answer, *, follows: bool) -> None:
        stream, handle = self._streams[name], next(self._handles)
        answer.attempts += 1
        self._live[name, handle] = answer
        await self._workers[name].shell.post(
            Submitted(
                at_s=time.monotonic(),
                key=SequenceKey(stream.stream_id, handle),
                request_id=answer.request_id,
                attempt=answer.attempts,
                prompt_token_ids=answer.prompt,
                sampling=answer.sampling,
                output_token_ids=tuple(answer.token_ids),
                output_text=answer.text,
                delivered_text_chars=len(answer.text),
                expects_handover=follows,
            )
        )

    async def _listen(self, name: str) -> None:
        while (output := await self._streams[name].next()) is not None:
            if output.emit is None:
                continue
            at = 0
            texts = output.emit.texts or ("",) * len(output.emit.handles)
            for handle, n, text in zip(output.emit.handles, output.emit.token_counts, texts, strict=True):
                answer = self._live[name, handle]
                answer.token_ids.extend(output.emit.token_ids[at : at + n])
                answer.token_at_s.extend([time.monotonic()] * n)
                answer.text += text
                at += n
            for ending in output.emit.endings:
                answer = self._live.pop((name, ending.handle))
                if ending.moved_to:
                    await self._place(ending.moved_to, answer, follows=True)
                elif ending.refused:
                    others = sorted(self._workers)
                    await asyncio.sleep(0.01)
                    await self._place(others[answer.attempts % len(others)], answer, follows=False)
                else:
                    answer.finish_reason, answer.error = ending.finish_reason, ending.error
                    self._done[answer.request_id].set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Cluster:
    def __init__(self, workers: dict[str, GroupWorker], layer_count: int) -> None:
        self.workers = workers
        self.layer_count = layer_count
        self.in_force = alone(1, sorted(workers), layer_count)
        self.dispatcher = Dispatcher(workers)

    def post(self, name: str, event: PlanReceived | Told) -> None:
        self.workers[name].shell.post_member(event)

    async def prepare(self, kind: Kind, target: Layout) -> Sequence[str]:
        """Returns the members once all are prepared."""
        base = self.in_force
        kept = set(base.groups) & set(target.groups)
        members = [m.worker_id for g in target.groups if g not in kept for m in g.members]
        addresses = {n: w.membership.plane.store_address for n, w in self.workers.items()}
        for name in members:
            held = {m.worker_id: range(m.first_layer, m.last_layer) for g in base.groups for m in g.members}
            sources = {
                layer: tuple(sorted(w for w, r in held.items() if layer in r and w != name))
                for layer in range(self.layer_count)
                if layer not in self.workers[name].engine.memory.parameters.held_layers
            }
            self.post(name, PlanReceived(Plan(kind, base, target), addresses, sources))  # pyright: ignore[reportArgumentType]
        await self.until(members, target.epoch, Phase.PREPARED)
        return members

    async def change(self, kind: Kind, target: Layout) -> dict[str, Progress]:
        members = await self.prepare(kind, target)
        for name in members:
            self.post(name, Told(target.epoch, CommitRequested(time.monotonic(), target.epoch)))
        await self.until(members, target.epoch, Phase.DONE)
        self.in_force = target
        return {name: self.workers[name].progress(target.epoch) for name in members}  # pyright: ignore[reportReturnType]

    async def abort(self, members: Sequence[str], epoch: Epoch) -> None:
        for name in members:
            self.post(name, Told(epoch, AbortRequested(time.monotonic(), epoch, "test")))
        await self.until(members, epoch, Phase.ABORTED)

    async def until(self, members: Sequence[str], epoch: Epoch, phase: Phase) -> None:
        async with asyncio.timeout(30.0):
            while True:
                said = {n: self.workers[n].progress(epoch) for n in members}
                phases = {n: p and p.phase for n, p in said.items()}
                if all(p is phase for p in phases.values()):
                    return
                failed = {n: p.why for n, p in said.items() if p and p.phase is Phase.FAILED}
                assert not failed, failed
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def running_group(model_dir: Path, names: Sequence[str], **given: object) -> AsyncGenerator[Cluster]:
    workers = {name: GroupWorker(name, model_dir, i + 1, **given) for i, name in enumerate(names)}
    layer_count = next(iter(workers.values())).engine.info.layer_count
    cluster = Cluster(workers, layer_count)
    async with asyncio.timeout(120.0), asyncio.TaskGroup() as tasks:
        for worker in workers.values():
            tasks.create_task(worker.shell.run())
        await cluster.dispatcher.attach()
        try:
            yield cluster
        finally:
            await cluster.dispatcher.close()
            for worker in workers.values():
                worker.shell.stop()
