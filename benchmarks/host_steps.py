"""Measures the host's work between two decode steps: `python -m benchmarks.host_steps [--rows 64 256] [--steps 200]`.

A worker's real shell, core, member, packer, detokeniser and output stream, without a GPU: the forward pass and
sampling are replaced by constants, and a step ends a given time (`--device-ms`) after the one before it, or
after its launch. Printed, in milliseconds of the engine thread's processor time, which other load hardly changes: the
work of a step, and for how long the device has nothing to compute, with steps one at a time and one step ahead.
"""

import argparse
import asyncio
import functools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import SamplingParams
from ballast.service.tokenizer import load_tokenizer
from services.worker.core.batch import Batch, LaunchedStep, StepResult
from services.worker.core.events import SequenceKey, Submitted
from services.worker.core.limits import WorkerLimits
from services.worker.engine.load import Engine, load_engine
from services.worker.engine.packing import PackedStep
from services.worker.links.config import TransportConfig
from services.worker.pipeline.build import join, stage_core
from services.worker.shell import WorkerShell
from services.worker.text import primed_detokenizer
from tools.model.tiny import make_tiny

_WARM_STEPS = 20
_BLOCK_TOKENS = 16


class TimedDevice:
    """An emulated device. Its clock is the processor time of the launching thread, plus the time spent waiting."""

    def __init__(self, engine: Engine, rows: int, step_s: float) -> None:
        self._launch = engine.runner.launch
        self._rows, self._step_s = rows, step_s
        self._free_at_s = self._waited_s = 0.0
        self.work_s: list[float] = []
        self.idle_s: list[float] = []
        self._began_s = 0.0

    @property
    def _now_s(self) -> float:
        return time.thread_time() + self._waited_s

    def launch(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> LaunchedStep:
        launched = self._launch(batch, block_tables)
        now_s, decodes = self._now_s, len(batch.slices) == self._rows == sum(len(s.token_ids) for s in batch.slices)
        if decodes and self._began_s:
            self.work_s.append(time.thread_time() - self._began_s)
            self.idle_s.append(max(0.0, now_s - self._free_at_s))
        self._began_s = time.thread_time() if decodes else 0.0
        self._free_at_s = max(now_s, self._free_at_s) + self._step_s
        return TimedStep(self, launched, self._free_at_s)

    def wait(self, until_s: float) -> None:
        self._waited_s += max(0.0, until_s - self._now_s)


@dataclass(frozen=True)
class TimedStep:
    device: TimedDevice
    launched: LaunchedStep
    ends_at_s: float

    def collect(self) -> StepResult:
        self.device.wait(self.ends_at_s)
        return self.launched.collect()


async def measure(model_dir: Path, rows: int, steps: int, context: int, step_s: float, *, ahead: bool) -> TimedDevice:
    tokens = context + steps + 2 * _WARM_STEPS
    engine = load_engine(model_dir, device_memory_bytes=rows * (tokens + 64) * 1024 + (32 << 20), kernels="torch")
    hidden_TD, logits_RV = torch.zeros(8192, 1), torch.zeros(rows, engine.info.vocab_size)
    runner: Any = engine.runner

    def compute(packed: PackedStep, *_: object) -> torch.Tensor:
        return hidden_TD[: packed.row_count]

    def logits(hidden_RD: torch.Tensor) -> torch.Tensor:
        return logits_RV[: len(hidden_RD)]

    def best(logits_RV: torch.Tensor) -> list[int]:
        return [17] * len(logits_RV)

    runner.compute, runner._model, runner._sampler._best = compute, mock.Mock(logits=logits), best
    limits = WorkerLimits(
        block_tokens=_BLOCK_TOKENS,
        max_model_len=engine.info.max_model_len,
        vocab_size=engine.info.vocab_size,
        eos_token_ids=frozenset(engine.info.eos_token_ids),
        max_running_count=rows,
        max_batch_tokens=8192,
        max_waiting_count=rows,
        max_waiting_tokens=1 << 22,
        async_scheduling=True,
    )
    core, book = stage_core(limits, engine, 1)
    detokenizer = functools.partial(primed_detokenizer, load_tokenizer(model_dir))
    shell = WorkerShell(core=core, engine=engine, detokenizer=detokenizer)
    device = TimedDevice(engine, rows, step_s)
    runner.launch = device.launch
    join(
        shell,
        me=WorkerId("w"),
        core=core,
        book=book,
        engine=engine,
        config=TransportConfig(),
        transport="tcp",
        advertise_host="127.0.0.1",
    )
    if not ahead:
        object.__setattr__(limits, "async_scheduling", False)  # a step is then waited for before the next is launched
    task = asyncio.create_task(shell.run())
    stream = await shell.open_stream()
    for handle in range(1, rows + 1):
        await shell.post(
            Submitted(
                at_s=time.monotonic(),
                key=SequenceKey(stream.stream_id, handle),
                request_id=RequestId(f"r{handle}"),
                attempt=0,
                prompt_token_ids=tuple(5 + (handle + at) % 400 for at in range(context)),
                sampling=SamplingParams(temperature=0.0, max_tokens=steps + _WARM_STEPS, ignore_eos=True),
                wants_text=True,
            )
        )
    ended = 0
    while ended < rows and (output := await stream.next()) is not None:
        ended += len(output.emit.endings) if output.emit is not None else 0
    shell.stop()
    await task
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--device-ms", type=float, default=8.0, help="duration of a step on the device")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| rows | ahead | host's work a step, ms | device idle a step, ms |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        longest = options.context + options.steps + 4 * _WARM_STEPS
        model_dir = make_tiny("llama", Path(folder) / "m", layers=2, max_len=longest)
        for rows in options.rows:
            for ahead in (False, True):
                step_s = options.device_ms / 1e3
                device = asyncio.run(measure(model_dir, rows, options.steps, options.context, step_s, ahead=ahead))
                work, idle = (
                    statistics.median(each[_WARM_STEPS // 2 :]) * 1e3 for each in (device.work_s, device.idle_s)
                )
                print(f"| {rows} | {'yes' if ahead else 'no'} | {work:.2f} | {idle:.2f} |", flush=True)


if __name__ == "__main__":
    main()
