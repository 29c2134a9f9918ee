"""Steps are recorded as graphs, and replayed before and after drops and restores."""

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from torch.distributed import Work

from ballast.common.errors import ConfigError
from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NewSequence, Slice
from services.worker.engine import decode_graphs, implementation, load
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.load import Engine, load_engine
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.packing import Packer
from services.worker.engine.peers import Peers
from services.worker.engine.rehearsal import Largest
from services.worker.ranks.channel import RankLog, RankLost
from services.worker.ranks.group import RankGroup
from services.worker.ranks.load import load_ranked
from services.worker.ranks.runner import RankedRunner
from tests.support.engine import Job, generate
from tools.model.tiny import make_tiny

pytest.importorskip("triton")


@pytest.mark.rotating
def test_replays_use_recorded_memory_and_a_drop_records_only_its_layers() -> None:
    """Runs in its own process, since Triton decides on import whether it compiles or interprets."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.worker.engine.replayed_graphs"]
    subprocess.run(command, check=True, timeout=200, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.rotating
def test_ranks_record_and_replay_in_lockstep_over_a_drop() -> None:
    program = "from tests.unit.worker.engine import replayed_ranks; replayed_ranks.main()"
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, env=environ)


def attention(
    device: torch.device, config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, name: str
) -> CudaAttention:
    return CudaAttention(config.head_count, config.kv_head_count, config.head_dim, dtype, device)


def test_a_device_that_cannot_record_is_reported_with_a_remedy(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(launch: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(implementation, "own_attention", attention)
    monkeypatch.setattr(load, "recorder", lambda device: refuse)  # pyright: ignore[reportUnknownLambdaType]
    largest = Largest(tokens=8, sequences=2)
    with pytest.raises(
        ConfigError, match=r"enforce_eager: has to be set here: all layers with 2 rows .* not permitted"
    ):
        load_engine(model_dir, device_memory_bytes=8 << 20, kernels="torch", largest=largest)
    load_engine(model_dir, device_memory_bytes=8 << 20, kernels="torch", largest=largest, enforce_eager=True).close()


@torch.inference_mode()
def test_a_batch_with_safepoints_does_not_record_its_layers_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_tiny("llama", tmp_path / "model", layers=8, max_len=64)
    recorded: list[object] = []

    def record(launch: Callable[[], None]) -> Callable[[], None]:
        recorded.append(launch)
        return lambda: None

    monkeypatch.setattr(implementation, "own_attention", attention)
    monkeypatch.setattr(load, "recorder", lambda device: record)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(decode_graphs, "_UNUSED_CALLS", 20)
    with load_engine(
        model_dir, device_memory_bytes=8 << 20, kernels="torch", largest=Largest(tokens=8, sequences=1)
    ) as engine:
        graphs, recorded_first = engine.runner.graphs, len(recorded)
        assert graphs is not None
        packed = Packer(engine.block_tokens).pack([Slice(0, 0, (3,), True)], [(0,)])
        hidden_TD = engine.model.embed(*[torch.zeros(1, dtype=torch.int64)] * 2)
        for _ in range(3):
            done = [graphs.run_layers(hidden_TD, packed, range(layer, layer + 1)) is not None for layer in range(8)]
            assert done == [True] * 4 + [False] * 4
        assert len(recorded) == recorded_first + 4
        found = [graphs.run_layers(hidden_TD, packed, range(4)) for _ in range(20)]  # as a stage after a drop
        assert found[-1] is not None
        assert len(recorded) == recorded_first + 5


def refusing_share(
    model_dir: Path, *, refusing: int, once_aborted: type[Exception], device: str, peers: Peers
) -> Engine:
    """Loads one rank's engine. Rank `refusing` cannot record; the others wait until they are aborted, as with NCCL."""
    aborted = threading.Event()

    def record(launch: Callable[[], None]) -> Callable[[], None]:
        if peers.rank == refusing:
            raise RuntimeError("operation not permitted when stream is capturing")
        aborted.wait()
        raise once_aborted(f"rank {peers.rank} was left alone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "own_attention", attention)
        patch.setattr(load, "recorder", lambda device: record)  # pyright: ignore[reportUnknownLambdaType]
        patch.setattr(RankGroup, "abort", lambda group: aborted.set())  # pyright: ignore[reportUnknownLambdaType]
        return load_engine(
            model_dir,
            device_memory_bytes=8 << 20,
            dtype="float32",
            largest=Largest(tokens=8, sequences=2),
            device=device,
            peers=peers,
        )


@pytest.mark.parametrize(("refusing", "once_aborted"), [(0, RankLost), (2, RankLost), (2, RuntimeError)])
def test_a_rank_that_cannot_record_is_reported_at_once_and_no_rank_waits(
    refusing: int, once_aborted: type[Exception], tmp_path: Path
) -> None:
    """The first rank may be aborted while it records a sum, and must not report the abort as the reason."""
    model_dir = make_tiny(
        "llama", tmp_path / "model", layers=1, heads=6, kv_heads=3, hidden=96, intermediate=192, max_len=64
    )
    share = functools.partial(refusing_share, model_dir, refusing=refusing, once_aborted=once_aborted)
    whose = rf" \(rank {refusing}\)$" if refusing else "$"
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"enforce_eager: has to be set here: all layers .* not permitted .*" + whose):
        load_ranked(share, ["cpu"] * 3, RankLog())
    assert time.monotonic() - began_s < 120.0  # most of it to start the ranks on a busy machine
    assert not [each for each in psutil.Process().children() if "services.worker.ranks" in each.cmdline()]


def test_a_sum_that_cannot_be_recorded_is_not_reported_as_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def allreduce(self, tensors: Sequence[torch.Tensor], opts: object) -> Work:
            raise RuntimeError("operation not permitted when stream is capturing")

    group = RankGroup(cast(Any, Failing()), 1, 2, torch.device("cuda", 1))
    for recording, error in ((False, RankLost), (True, RuntimeError)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda said=recording: said)
        with pytest.raises(error, match="not permitted"):
            group.sum(torch.zeros(1))


def test_results_of_an_aborted_sum_are_discarded(model_dir: Path) -> None:
    """On a GPU, an aborted sum ends without an error, whether launched or replayed."""

    class Summing:
        sums, lost_in = 0, 0

        def allreduce(self, tensors: Sequence[torch.Tensor], opts: object) -> Work:
            self.sums += 1
            if self.sums == self.lost_in:
                group.abort()
            return cast(Any, SimpleNamespace(wait=lambda: None))

        def abort(self) -> None:
            """Lets the work that waits on the device complete."""

    class Silent:
        def tell(self, message: object) -> None:
            """Does nothing, since there is no other rank."""

        def lost(self) -> None:
            """Returns no reason: the loss has not been noticed yet."""

    summing = Summing()
    group = RankGroup(cast(Any, summing), 0, 2, torch.device("cuda", 0))
    with load_engine(model_dir, device_memory_bytes=8 << 20, kernels="torch", peers=group) as engine:
        runner = RankedRunner(engine, cast(Any, Silent()), group)
        new = NewSequence(0, (3, 4), (), SamplingParams(temperature=0.0))
        batch = Batch(0, (), (new,), (Slice(0, 0, (3, 4), True),))
        for last_layer in (1, engine.config.layer_count):
            runner.run_stage(batch, [(0,)], None, first_layer=0, last_layer=last_layer)
            runner.forget_all()
        runner.launch(batch, [(0,)]).collect()
        runner.forget_all()
        summing.lost_in = summing.sums + 2
        launched = runner.launch(batch, [(0,)])
        with pytest.raises(RankLost, match="rank 0 of 2 was left alone"):
            launched.collect()
        runner.forget_all()
        for last_layer in (1, engine.config.layer_count):
            with pytest.raises(RankLost, match="rank 0 of 2 was left alone"):
                runner.run_stage(batch, [(0,)], None, first_layer=0, last_layer=last_layer)
            runner.forget_all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_the_device_a_drop_and_a_restore_change_no_token_of_graphs(tmp_path: Path, dtype: str) -> None:
    model_dir = make_tiny("qwen3", tmp_path / "model", seed=7, layers=4)
    chosen: list[list[list[int]]] = []
    for enforce_eager in (True, False):
        with load_engine(
            model_dir,
            dtype=dtype,
            device_memory_bytes=256 << 20,
            device="cuda",
            largest=Largest(tokens=64, sequences=8),
            enforce_eager=enforce_eager,
        ) as engine:
            blocks = engine.block_count
            for dropped in ((), (2, 3)):
                if dropped:
                    engine.memory.drop_layers(dropped)
                    engine.memory.make_room_for_layers(dropped, block_count=blocks)
                for layer in dropped:
                    engine.read_layer(layer)
                jobs = [Job(i, tuple(range(3, 3 + length)), 16) for i, length in enumerate((1, 15, 64, 200))]
                generate(engine, jobs, chunk_tokens=64)
                chosen.append([job.chosen for job in jobs])
    eager, eager_after, recorded, recorded_after = chosen
    assert (eager_after, recorded_after) == (eager, recorded)
    if dtype == "float32":  # a recording has more rows, for which a product may round differently
        assert recorded == eager
