"""Two ranks, each a process, record steps and replay them in lockstep before, during and after a drop. Their tokens
must equal those of one rank that records nothing. Import this module with TRITON_INTERPRET=1; see `replayed_graphs`.

Each rank logs its recordings and replays to a file. The sum over ranks is watched like all launches of a recording.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from services.worker.core.batch import StepResult
from services.worker.engine.load import Engine
from services.worker.engine.peers import Peers
from services.worker.ranks.channel import RankLog
from services.worker.ranks.load import load_ranked
from tests.unit.worker.engine.replayed_graphs import (
    DROPPED,
    LAYERS,
    Record,
    as_on_a_gpu,
    decodes,
    engine_of,
    hidden_of,
    tokens_ahead,
    tokens_of,
)
from tools.model.tiny import make_tiny

RANKS, BUCKETS = 2, 3  # for 1, 2 and 3 rows
SUMS = 2  # per layer


class WrittenDown(Record):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self.sums = 0

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        assert isinstance(launch, functools.partial)
        *_, layers, rows = launch.args
        where = f"{layers.start}-{layers.stop}"
        self._write("records", where, rows)
        before = self.sums
        replay = super().__call__(launch)
        assert self.sums == before + SUMS * len(layers), "the recording must contain the sum over ranks"

        def replay_in_lockstep() -> None:
            self._write("replays", where, rows)  # logged before the sums, so that after them every rank has logged it
            replay()

        return replay_in_lockstep

    def _write(self, *words: object) -> None:
        with self._file.open("a") as file:
            print(*words, file=file)


class SeenPeers:
    """Peers whose sums are counted and watched."""

    def __init__(self, peers: Peers, record: WrittenDown) -> None:
        self._peers = peers
        self._record = record
        self.rank, self.count = peers.rank, peers.count

    def sum(self, tensor: torch.Tensor) -> None:
        self._record.sums += 1
        if self._record.watched is not None:
            self._record.watched.use([tensor])
        self._peers.sum(tensor)

    def least(self, number: int) -> int:
        return self._peers.least(number)


def share(folder: Path, *, written: Path, device: str, peers: Peers) -> Engine:
    """Loads a rank's share of the model, in the rank's process."""
    torch.set_num_threads(1)
    record = WrittenDown(written / str(peers.rank))
    as_on_a_gpu(record)
    return engine_of(folder, eager=False, device=device, peers=SeenPeers(peers, record))


def last_stage_of(engine: Engine, hidden_TD: torch.Tensor) -> tuple[int, ...]:
    """Tokens of the last stage for hidden states that only the first rank received."""
    batch, tables = decodes(engine, 0)
    out = engine.runner.run_stage(batch, tables, hidden_TD.clone(), first_layer=DROPPED[0], last_layer=LAYERS)
    assert isinstance(out, StepResult)
    engine.runner.forget_all()
    return out.token_ids


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        written = Path(name) / "written"
        written.mkdir()
        folder = make_tiny("qwen3", Path(name) / "model", seed=7, layers=LAYERS)
        as_on_a_gpu(Record())
        with engine_of(folder, eager=True) as engine:
            expected, expected_TD = tokens_of(engine), hidden_of(engine, 0)
            expected_ids = last_stage_of(engine, expected_TD)

        def lines(word: str) -> list[str]:
            """The lines of the log that start with `word`. All ranks must have logged the same."""
            first, *others = [(written / str(rank)).read_text().splitlines() for rank in range(RANKS)]
            assert others == [first] * len(others)
            return [line for line in first if line.startswith(word)]

        with load_ranked(
            functools.partial(share, folder, written=written), ["cpu"] * RANKS, RankLog()
        ).engine as engine:
            recorded = lines("records")
            assert len(recorded) == BUCKETS
            assert tokens_of(engine) == expected
            replayed, blocks = lines("replays"), engine.block_count
            assert replayed
            engine.memory.drop_layers(DROPPED)
            assert engine.block_count > blocks + 3
            # KV is in memory that belonged to the dropped parameters.
            recording_TD, hidden_TD = (hidden_of(engine, engine.block_count - 3) for _ in range(2))
            for each_TD in (recording_TD, hidden_TD):
                torch.testing.assert_close(each_TD, expected_TD, atol=1e-5, rtol=1e-5)
            first, last = f"0-{DROPPED[0]} 3", f"{DROPPED[0]}-{LAYERS} 3"
            assert lines("replays") == [*replayed, f"replays {first}"]
            engine.memory.make_room_for_layers(DROPPED, block_count=blocks)
            for layer in DROPPED:
                engine.read_layer(layer)
            assert tokens_of(engine) == expected
            assert last_stage_of(engine, hidden_TD) == expected_ids
            assert last_stage_of(engine, hidden_TD) == expected_ids
            assert lines("replays") == [*replayed, f"replays {first}", *replayed, f"replays {last}"]
            assert lines("records") == [*recorded, f"records {first}", f"records {last}"]
            replayed = lines("replays")
            assert tokens_ahead(engine) == expected
            assert lines("replays") == [*replayed, *[f"replays 0-{LAYERS} 3"] * 2]
