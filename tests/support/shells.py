"""A worker's shell over a small real engine, and engines that misbehave on demand."""

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from ballast.common.ids import RequestId
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.sampling import SamplingParams
from ballast.service.tokenizer import load_tokenizer
from services.worker.core.batch import Batch, StepResult
from services.worker.core.events import Ending, SequenceKey, Submitted
from services.worker.core.limits import WorkerLimits
from services.worker.core.worker import WorkerCore
from services.worker.engine.load import load_engine
from services.worker.output_stream import OutputStream
from services.worker.shell import StepEngine, WorkerShell
from services.worker.text import primed_detokenizer

MEMORY_BYTES = 4 << 20
_handles = count(1)


class Disturbed:
    """Delegates to a real engine. `before_step` may raise, or block the engine thread."""

    def __init__(self, engine: StepEngine, before_step: Callable[[int], None]) -> None:
        self._engine = engine
        self._before_step = before_step
        self.steps = 0
        self.closed = False

    def compute_here(self) -> None:
        self._engine.compute_here()

    def step(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> StepResult:
        self.steps += 1
        self._before_step(self.steps)
        return self._engine.step(batch, block_tables)

    def memory_report(self) -> MemoryReport:
        return self._engine.memory_report()

    def check(self) -> None:
        self._engine.check()

    def close(self) -> None:
        self.closed = True
        self._engine.close()


class Gate:
    """Blocks steps until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.entered = threading.Event()

    def __call__(self, step: int) -> None:
        self.entered.set()
        assert self._open.wait(60.0)

    def open(self) -> None:
        self._open.set()


def undisturbed(step: int) -> None:
    pass


def slow(step: int) -> None:
    time.sleep(0.005)


@contextlib.asynccontextmanager
async def running_shell(
    model_dir: Path,
    before_step: Callable[[int], None] = undisturbed,
    *,
    max_running_count: int = 8,
    max_waiting_count: int = 64,
    max_batch_tokens: int = 512,
) -> AsyncGenerator[WorkerShell]:
    """A running shell. On exit, stops the shell and checks that its thread and engine have ended. Raises the shell's
    error, if any.
    """
    real = load_engine(model_dir, device_memory_bytes=MEMORY_BYTES)
    engine = Disturbed(real, before_step)
    limits = WorkerLimits(
        block_tokens=real.block_tokens,
        max_model_len=real.info.max_model_len,
        vocab_size=real.info.vocab_size,
        eos_token_ids=frozenset(real.info.eos_token_ids),
        max_running_count=max_running_count,
        max_waiting_count=max_waiting_count,
        max_batch_tokens=max_batch_tokens,
    )
    shell = WorkerShell(
        core=WorkerCore(limits, real.block_count),
        engine=engine,
        detokenizer=functools.partial(primed_detokenizer, load_tokenizer(model_dir)),
        check_every_steps=1,
    )
    before = set(threading.enumerate())
    try:
        async with asyncio.timeout(120.0), asyncio.TaskGroup() as tasks:
            tasks.create_task(shell.run())
            yield shell
            shell.stop()
    finally:
        for thread in set(threading.enumerate()) - before:
            if thread.name == "engine":
                thread.join(timeout=30.0)
                assert not thread.is_alive()
        assert engine.closed


def submission(stream: OutputStream, max_tokens: int, prompt: Sequence[int] = (9, 8, 7), **given: object) -> Submitted:
    """A greedy request that ends only by its length. `given` replaces fields of Submitted."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    fields = {"prompt_token_ids": tuple(prompt), "sampling": sampling, "attempt": 1} | given
    handle = next(_handles)
    key = SequenceKey(stream.stream_id, handle)
    # Tests choose the fields, so the type checker cannot verify these.
    return Submitted(at_s=time.monotonic(), key=key, request_id=RequestId(f"r{handle}"), **fields)  # pyright: ignore[reportArgumentType]


@dataclass
class Heard:
    """What one stream delivered for one handle."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    ending: Ending | None = None


async def listen(stream: OutputStream, handles: Sequence[int]) -> dict[int, Heard]:
    """Reads until each of the handles has ended."""
    heard = {handle: Heard() for handle in handles}
    while any(one.ending is None for one in heard.values()):
        output = await stream.next()
        assert output is not None, "the stream ended before its requests did"
        if (emit := output.emit) is None:
            continue
        tokens = iter(emit.token_ids)
        for index, handle in enumerate(emit.handles):
            one = heard[handle]
            assert one.ending is None, f"{handle} gets output after its end"
            assert handle <= output.seen_handle
            one.token_ids += [next(tokens) for _ in range(emit.token_counts[index])]
            one.text += emit.texts[index] if emit.texts else ""
        for ending in emit.endings:
            assert heard[ending.handle].ending is None, f"{ending.handle} ends twice"
            heard[ending.handle].ending = ending
    return heard


async def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    give_up_at_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up_at_s, f"the condition is still false after {within_s} s"
        await asyncio.sleep(0.005)


def held(load: LoadReport) -> tuple[int, int, int, int]:
    return load.used_block_count, load.waiting_block_count, load.running_count, load.waiting_count


NOTHING_HELD = (0, 0, 0, 0)
