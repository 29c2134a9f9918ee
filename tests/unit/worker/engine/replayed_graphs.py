"""Generates with recorded steps before, during and after a drop, and compares with an engine that records nothing. Run
it as a program with TRITON_INTERPRET=1. Kernels are interpreted on the CPU, in memory that is really unmapped and
mapped again, so a read of unmapped memory ends this process.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import services.worker.engine.attention_cuda as attention_cuda
import services.worker.engine.implementation as implementation
import services.worker.engine.load as load
import services.worker.engine.model as model
from services.worker.core.batch import IN_FLIGHT, Batch, NewSequence, Slice
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.load import Engine, load_engine
from services.worker.engine.operations import FusedOperations
from services.worker.engine.rehearsal import Largest
from tests.support.engine import GREEDY, BlockPool, Job, generate
from tools.model.tiny import make_tiny

LAYERS, MEMORY_BYTES, LONGEST = 2, 8 << 20, 64
DROPPED = (1,)


class Watched(TorchDispatchMode):
    """Collects the addresses of the tensors that are used and were allocated earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()
        self._made: list[torch.Tensor] = []  # allocated since then; a graph has its own memory for these

    def use(self, values: Sequence[Any]) -> None:
        made = {tensor.untyped_storage().data_ptr() for tensor in self._made}
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self.used |= {tensor.data_ptr() for tensor in tensors if tensor.untyped_storage().data_ptr() not in made}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        self.use(given)
        there = {each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in there:
            self._made.append(out)
        return out


class Record:
    """Replays a recording by running it again, and asserts that this uses exactly the recorded memory."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.watched: Watched | None = None

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        recorded = self._watch(launch)

        def replay() -> None:
            self.replayed += 1
            assert self._watch(launch) == recorded

        return replay

    def _watch(self, launch: Callable[[], None]) -> set[int]:
        with Watched() as self.watched:
            launch()
        used, self.watched = self.watched.used, None
        return used


class Seen:
    """A kernel that reports its arguments to `Watched`."""

    def __init__(self, kernel: Any, record: Record) -> None:
        self._kernel = kernel
        self._record = record

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **constants: Any) -> None:
            if self._record.watched is not None:
                self._record.watched.use(given)
            self._kernel[grid](*given, **constants)

        return launch


class SeenKernels:
    def __init__(self, kernels: Any, record: Record) -> None:
        self._seen = {n: Seen(getattr(kernels, n), record) for n in ("add_and_norm", "rotate_and_write", "activate")}

    def __getattr__(self, name: str) -> Seen:
        return self._seen[name]


def as_on_a_gpu(record: Record) -> None:
    """Makes engines on the CPU use a GPU's kernels, and record with `record`."""

    def attention(
        device: torch.device, config: Any, dtype: torch.dtype, kv_dtype: torch.dtype, name: str
    ) -> CudaAttention:
        made = CudaAttention(config.head_count, config.kv_head_count, config.head_dim, dtype, device)
        made._kernel, made._join = Seen(made._kernel, record), Seen(made._join, record)
        return made

    def operations(*given: Any) -> FusedOperations:
        made = FusedOperations(*given)
        made._kernels = SeenKernels(made._kernels, record)
        return made

    attention_cuda._LEAST_PART = 16  # so that short contexts, which need few programs, are split
    attention_cuda._LEAST_PROGRAMS = attention_cuda._PROGRAMS_PER_ROW = 1  # so that some rows have several parts

    def recorder(device: torch.device) -> Record:
        return record

    implementation.own_attention, load.recorder, model.operations_for = attention, recorder, operations


def engine_of(folder: Path, *, eager: bool, **given: Any) -> Engine:
    return load_engine(
        folder,
        device_memory_bytes=MEMORY_BYTES,
        dtype="float32",
        max_model_len=LONGEST,
        kernels="torch",
        largest=Largest(tokens=24, sequences=3),
        enforce_eager=eager,
        **given,
    )


def jobs() -> list[Job]:
    return [Job(i, tuple(range(3, 3 + length)), 3) for i, length in enumerate((1, 17, 5))]


def tokens_of(engine: Engine) -> list[list[int]]:
    made = jobs()
    generate(engine, made, at_once=3, chunk_tokens=20)
    return [job.chosen for job in made]


def tokens_ahead(engine: Engine) -> list[list[int]]:
    """Generates the same tokens, but launches each step before the previous step's tokens are known."""
    made, pool = jobs(), BlockPool(engine.block_count, engine.block_tokens)
    added = tuple(NewSequence(job.sequence_id, job.prompt, (), GREEDY) for job in made)
    tables = [pool.take(len(job.prompt) + job.count) for job in made]
    launched = [
        engine.runner.launch(
            Batch(
                step,
                (),
                () if step else added,
                tuple(
                    Slice(i, len(job.prompt) + step - 1, (IN_FLIGHT,), True) if step else Slice(i, 0, job.prompt, True)
                    for i, job in enumerate(made)
                ),
            ),
            tables,
        )
        for step in range(3)
    ]
    collected = [each.collect().token_ids for each in launched]
    engine.runner.forget_all()
    return [list(tokens) for tokens in zip(*collected, strict=True)]


def decodes(engine: Engine, first_block: int) -> tuple[Batch, list[tuple[int, ...]]]:
    """A batch of three decodes, in blocks from `first_block` on."""
    pool = BlockPool(3, engine.block_tokens, first_block=first_block)
    contexts = (1, 1, 1)
    slices = tuple(Slice(i, context - 1, (7 + i,), True) for i, context in enumerate(contexts))
    added = tuple(NewSequence(i, (7 + i,), (), GREEDY) for i in range(3))
    return Batch(0, (), added, slices), [pool.take(context) for context in contexts]


def hidden_of(engine: Engine, first_block: int) -> torch.Tensor:
    """Hidden states of a batch of decodes after the layers before the dropped one."""
    batch, tables = decodes(engine, first_block)
    out = engine.runner.run_stage(batch, tables, None, first_layer=0, last_layer=DROPPED[0])
    assert isinstance(out, torch.Tensor)
    engine.runner.forget_all()
    return out


def run_larger_step(engine: Engine) -> None:
    """Run a chunk that is larger than any step of this worker's own, as a follower of a leader with a higher limit."""
    batch = Batch(0, (), (NewSequence(0, (3,) * 40, (), GREEDY),), (Slice(0, 0, (3,) * 40, True),))
    engine.runner.run_stage(batch, [BlockPool(3, engine.block_tokens).take(40)], None, first_layer=0, last_layer=1)
    engine.runner.forget_all()


def main() -> None:
    record = Record()
    with tempfile.TemporaryDirectory() as name:
        folder = make_tiny("qwen3", Path(name) / "model", seed=7, layers=LAYERS)
        as_on_a_gpu(record)
        with engine_of(folder, eager=True) as engine:
            expected, expected_TD = tokens_of(engine), hidden_of(engine, 0)
        assert (record.recorded, record.replayed) == (0, 0)
        with engine_of(folder, eager=False) as engine:
            assert record.recorded == 3  # all layers, for 1, 2 and 3 rows
            assert tokens_of(engine) == expected
            replayed, blocks = record.replayed, engine.block_count
            assert replayed > 0
            run_larger_step(engine)
            engine.memory.drop_layers(DROPPED)
            assert engine.block_count > blocks + 3
            for _ in range(2):  # first recorded, then replayed, with KV in the memory of the dropped parameters
                assert torch.equal(hidden_of(engine, engine.block_count - 3), expected_TD)
            assert (record.recorded, record.replayed) == (4, replayed + 1)
            engine.memory.make_room_for_layers(DROPPED, block_count=blocks)
            for layer in DROPPED:
                engine.read_layer(layer)
            assert tokens_of(engine) == expected
            assert torch.equal(hidden_of(engine, 0), expected_TD)
            assert (record.recorded, record.replayed) == (4, 2 * replayed + 2)
            assert tokens_ahead(engine) == expected
            assert record.replayed == 2 * replayed + 4


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    main()
