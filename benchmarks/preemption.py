"""Benefit and cost of preempting offline work within a step:

    python -m benchmarks.preemption [--arrivals 200] [--steps 200] [--write]

Benefit: a worker with an emulated A100-40G and Llama-2-7B computes endless offline summaries; online requests arrive at
random. The program measures the time from an arrival during an offline-only step until the step is preempted, and the
longest slice. On the CPU engine, a model with 8 layers runs in slices of 2 layers: alone, as the second of two stages,
and on two ranks. The program measures the time from a random moment of a step until the step is preempted. Cost: the
thread's processor time for steps of 64 prompt tokens of that model on one core, alternately whole and in 4 slices.
"""

import argparse
import asyncio
import functools
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch

from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import PriorityClass, SamplingParams
from ballast.common.targets import for_all
from benchmarks.offline import CLUSTER, MODEL, PAGE, quantile, summaries
from benchmarks.quoting import quote_run
from services.worker.core.batch import Batch, NewSequence, Preempted, Slice
from services.worker.core.events import Event, SequenceKey, StepDone, StepPreempted, Submitted
from services.worker.core.limits import WorkerLimits
from services.worker.emulation.connection import EmulatedOpener
from services.worker.emulation.engine import emulate
from services.worker.engine.load import Engine, load_engine
from services.worker.links.config import TransportConfig
from services.worker.links.pace import StagePace
from services.worker.links.plane import DataPlane
from services.worker.output_stream import OutputStream
from services.worker.pipeline.build import BuiltInstance, join, stage_core
from services.worker.pipeline.hub import Hub
from services.worker.policy.harvest import Harvest
from services.worker.ranks.channel import RankLog
from services.worker.ranks.load import load_ranked
from services.worker.shell import WorkerShell
from sim.jobs.machines import catalogue_machine
from tools.model.tiny import make_tiny

TTFT_TARGET_S = 0.1  # with this target, offline steps consist of slices of 6 ms
VOCABULARY = 4096
OFFLINE_COUNT = 32
LAYERS, HIDDEN, TOKENS, SLICES = 8, 512, 64, 4


class Reactions:
    """Wraps a core's `handle` and a clock's `run` to record the ends of steps and the longest slice."""

    def __init__(self, handle: Callable[[Event], Any], run: Callable[..., None]) -> None:
        self.steps: list[tuple[float, bool]] = []  # (end of a step, whether it was preempted)
        self.longest_slice_s = 0.0
        self._handle = handle
        self._run = run

    def handle(self, event: Event) -> Any:
        if isinstance(event, StepDone | StepPreempted):
            self.steps.append((event.at_s, isinstance(event, StepPreempted)))
        return self._handle(event)

    def run(self, seconds: float, began_s: float, given_s: float | None, slice_count: int = 1, *rest: Any) -> None:
        if slice_count > 1:
            self.longest_slice_s = max(self.longest_slice_s, seconds / slice_count)
        self._run(seconds, began_s, given_s, slice_count, *rest)


async def react(arrivals: int, seed: int) -> tuple[list[float], float]:
    """(seconds from each arrival during an offline-only step until its preemption, longest slice in seconds)."""
    machine = catalogue_machine(CLUSTER.removeprefix("1x"), MODEL, VOCABULARY)
    engine = emulate(machine)
    cost = machine.execution.cost_of(machine.model.layer_count, is_first=True, is_last=True)
    limits = WorkerLimits(
        block_tokens=16,
        max_model_len=engine.info.max_model_len,
        vocab_size=VOCABULARY,
        eos_token_ids=frozenset(),
        max_running_count=64,
        max_batch_tokens=512,
        max_waiting_count=256,
    )
    harvest = Harvest(lambda: cost, targets=for_all(ttft_s=TTFT_TARGET_S), layer_count=machine.model.layer_count)
    core, book = stage_core(limits, cast(BuiltInstance, engine), 1, harvest=harvest)
    clock = engine.runner.clock
    heard = Reactions(core.handle, clock.run)
    core.handle = heard.handle  # pyright: ignore[reportAttributeAccessIssue]
    clock.run = heard.run  # pyright: ignore[reportAttributeAccessIssue]
    shell = WorkerShell(core=core, engine=engine, detokenizer=cast(Any, None))

    def open_plane(hub: Hub, secret: bytes | None) -> DataPlane:
        opener = EmulatedOpener(hub, machine.link_bytes_per_s, clock)
        return DataPlane(WorkerId("w"), opener, host="127.0.0.1", pace=StagePace(), secret=secret)

    join(
        shell,
        me=WorkerId("w"),
        core=core,
        book=book,
        engine=cast(BuiltInstance, engine),
        config=TransportConfig(),
        advertise_host="127.0.0.1",
        open_plane=open_plane,
    )
    running = asyncio.create_task(shell.run())
    try:
        return await _arrive(shell, heard, arrivals, random.Random(seed)), heard.longest_slice_s
    finally:
        shell.stop()
        await running


async def _arrive(shell: WorkerShell, heard: Reactions, arrivals: int, rng: random.Random) -> list[float]:
    stream, handles, lengths = await shell.open_stream(), count(1), summaries(1)
    reading = asyncio.create_task(_read(stream))

    async def submit(prompt: int, answer: int, priority: PriorityClass) -> float:
        key = SequenceKey(stream.stream_id, next(handles))
        tokens = tuple(rng.randrange(VOCABULARY) for _ in range(prompt))
        at_s = time.monotonic()
        event = Submitted(
            at_s=at_s,
            key=key,
            request_id=RequestId(f"r{key.handle}"),
            attempt=1,
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=answer, temperature=0.0, seed=0, ignore_eos=True),
            priority=priority,
            wants_text=False,
        )
        await shell.post(event)
        return at_s

    found: list[float] = []
    for number in range(arrivals):
        while shell.load().offline_running_count + shell.load().offline_waiting_count < OFFLINE_COUNT:
            await submit(*rng.choice(lengths), PriorityClass.BATCH)
            await asyncio.sleep(0.001)
        await asyncio.sleep(rng.uniform(0.1, 0.2))
        seen, at_s = len(heard.steps), await submit(32, 2, PriorityClass.INTERACTIVE)
        await until(lambda seen=seen: len(heard.steps) > seen)
        ended_s, preempted = heard.steps[seen]
        found += [ended_s - at_s] if preempted else []
        print(f"\r{number + 1} of {arrivals}, {len(found)} found a step to preempt", end="", file=sys.stderr)
    reading.cancel()
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():  # noqa: ASYNC110 - the engine's thread makes it true
            await asyncio.sleep(0.001)


async def _read(stream: OutputStream) -> None:
    while await stream.next() is not None:
        pass


class SlicedSteps:
    """Steps of one prompt each."""

    def __init__(self, engine: Engine, first_layer: int = 0) -> None:
        self._engine, self._first_layer, self._step_id = engine, first_layer, 0
        first, self._prompt = engine.memory.kv.window.first_block, tuple(range(5, 5 + TOKENS))
        self._table = tuple(range(first, first + TOKENS // engine.block_tokens + 1))
        self._hidden = torch.zeros(TOKENS, HIDDEN, dtype=torch.float32) if first_layer else None

    def run(self, safepoint_layers: int, preempted: Callable[[], bool] = lambda: False) -> None:
        self._step_id += 1
        batch = Batch(
            self._step_id,
            (self._step_id - 1,) if self._step_id > 1 else (),
            (NewSequence(self._step_id, self._prompt, (), SamplingParams(temperature=0.0, ignore_eos=True)),),
            (Slice(self._step_id, 0, self._prompt, True),),
            safepoint_layers=safepoint_layers,
        )
        layers = {"first_layer": self._first_layer, "last_layer": LAYERS}
        self._engine.runner.run_stage(batch, [self._table], self._hidden, **layers, preempted=preempted)


def reactions_of_engine(steps: SlicedSteps, layer_count: int, count: int, seed: int) -> tuple[list[float], float]:
    """(seconds from random moments of a step until the step is preempted, median duration of a slice)."""
    whole: list[float] = []
    for _ in range(20):
        began_s = time.monotonic()
        steps.run(LAYERS // SLICES)
        whole.append(time.monotonic() - began_s)
    step_s, rng, found = quantile(whole, 0.5), random.Random(seed), list[float]()
    for _ in range(count):
        at_s = time.monotonic() + rng.uniform(0.0, step_s * (1 - SLICES / LAYERS / 2))
        try:
            steps.run(LAYERS // SLICES, lambda at_s=at_s: time.monotonic() >= at_s)
        except Preempted:
            found.append(time.monotonic() - at_s)
    return found, step_s * LAYERS / SLICES / layer_count


def engine_reactions(folder: Path, count: int, seed: int) -> list[str]:
    model = make_tiny("llama", folder / "model", layers=LAYERS, hidden=HIDDEN, heads=8, kv_heads=4, max_len=1024)
    load = functools.partial(load_engine, model, device_memory_bytes=512 << 20, dtype="float32")
    lines: list[str] = []
    for name, first_layer, ranks in (("alone", 0, 1), ("second of two stages", LAYERS // 2, 1), ("two ranks", 0, 2)):
        with load() if ranks == 1 else load_ranked(load, ["cpu"] * ranks, RankLog()).engine as engine:
            found, slice_s = reactions_of_engine(SlicedSteps(engine, first_layer), LAYERS - first_layer, count, seed)
        p50, p99 = (quantile(found, fraction) * 1e3 for fraction in (0.5, 0.99))
        gave_way = f"{len(found)} of {count} steps gave way after P50 {p50:.1f}, P99 {p99:.1f} ms"
        lines.append(f"CPU engine, {name}: {gave_way}; a slice takes {slice_s * 1e3:.1f} ms (median)")
    return lines


def cost_of_slices(folder: Path, count: int) -> list[float]:
    """Processor time of a sliced step relative to a whole one, for each pair of steps."""
    model = make_tiny("llama", folder / "model", layers=LAYERS, hidden=HIDDEN, heads=8, kv_heads=4, max_len=1024)
    ratios: list[float] = []
    with load_engine(model, device_memory_bytes=512 << 20, dtype="float32") as engine:
        steps = SlicedSteps(engine)

        def step_s(safepoint_layers: int) -> float:
            began_s = time.thread_time()
            steps.run(safepoint_layers)
            return time.thread_time() - began_s

        for number in range(count):
            slices = [0, LAYERS // SLICES][:: 1 if number % 2 == 0 else -1]
            took_s = {each: step_s(each) for each in slices}
            ratios.append(took_s[LAYERS // SLICES] / took_s[0])
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrivals", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write the figures into {PAGE}")
    args = parser.parse_args()
    found, slice_s = asyncio.run(react(args.arrivals, args.seed))
    print("\r", end="", file=sys.stderr)
    reaction = (
        f"{len(found)} of {args.arrivals} arrivals found a step of offline work: it gave way after P50"
        f" {quantile(found, 0.5) * 1e3:.1f}, P99 {quantile(found, 0.99) * 1e3:.1f} ms; slices take up to"
        f" {slice_s * 1e3:.1f} ms"
    )
    print(reaction, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        engines = engine_reactions(Path(folder), args.steps, args.seed)
    print("\n".join(engines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ratios = cost_of_slices(Path(folder), args.steps)
    low, median, high = (f"{quantile(ratios, fraction) - 1:+.1%}" for fraction in (0.25, 0.5, 0.75))
    cost = f"{args.steps} steps in {SLICES} slices: {median} of processor time (quartiles {low}, {high})"
    print(cost)
    if args.write:
        lines = "\n".join(f"- {line}" for line in (reaction, *engines, cost))
        quote_run(PAGE, "offline-preemption", lines, note=f"load average {os.getloadavg()[0]:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
