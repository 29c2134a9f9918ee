"""Loads a model as one instance of several ranks."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ballast.common.errors import ConfigError
from ballast.service.logs import get_logger
from services.worker.engine.choice import choose_model
from services.worker.engine.load import Engine
from services.worker.engine.peers import Apart
from services.worker.memory.parameters import combined
from services.worker.ranks.channel import RankLog, RankLost, RankReady
from services.worker.ranks.crew import Crew
from services.worker.ranks.group import RankGroup, meet
from services.worker.ranks.memory import Mirror, RankedMemory
from services.worker.ranks.runner import RankedRunner

_WATCH_S = 0.2


@dataclass(frozen=True, slots=True)
class Ranked:
    """Rank 0's engine, which represents all ranks, and the processes of the others."""

    engine: Engine
    crew: Crew
    group: RankGroup

    def lost(self) -> str | None:
        """Text that says which other rank has ended, and how; waits for it are aborted then. Safe from any thread."""
        if (who := self.crew.lost()) is not None:
            self.group.abort()
        return who

    @property
    def exchanges(self) -> bool:
        """True if KV and layers of all ranks can be moved: rank 0 has their memory mapped."""
        return bool(self.engine.memory.kv.mirrors)


def load_ranked(load_one: functools.partial[Engine], devices: Sequence[str], log: RankLog) -> Ranked:
    """Load one rank on each of the devices, which are of one kind; for CPUs their number is the number of ranks.
    `load_one`: `load_engine` with the common arguments; memory sizes are per rank.

    Raises:
        ConfigError: as `load_engine`; or heads or MLP are not divisible by the number of ranks.
        RankLost: one of their processes has ended.
    """
    model_dir: Path = load_one.args[0]
    count = len(devices)
    told = load_one.keywords
    choose_model(  # before any process is started
        model_dir,
        model_impl=told.get("model_impl", "auto"),
        dtype=told.get("dtype", "auto"),
        device=devices[0],
        kernels=told.get("kernels", "auto"),
        max_model_len=told.get("max_model_len"),
        peers=Apart(0, count),
    )
    with contextlib.ExitStack() as files, contextlib.ExitStack() as undo:
        meeting = Path(files.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))) / "ranks"
        crew = Crew(count)
        undo.callback(crew.close)
        crew.start(devices, meeting, log, load_one)
        group = meet(meeting, 0, [torch.device(device) for device in devices])
        engine = _load_first(load_one, devices[0], crew, group)
        undo.callback(engine.close)
        shares = crew.loaded()
        _require_equal(engine, shares)
        mirrors = open_mirrors(engine, [crew.files(rank) for rank in range(1, count)])
        undo.callback(lambda: [mirror.close() for mirror in mirrors])
        store = engine.memory.parameters
        for layer, own in store.loaded_checksums.items():
            store.loaded_checksums[layer] = combined([own, *(share.checksums[layer] for share in shares)])
        memory = RankedMemory(engine.memory, mirrors, crew, count)
        undo.pop_all()
        return Ranked(replace(engine, memory=memory, runner=RankedRunner(engine, crew, group)), crew, group)


def _load_first(load_one: functools.partial[Engine], device: str, crew: Crew, group: RankGroup) -> Engine:
    """Load rank 0's shard; aborted if another rank ends meanwhile."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_S):
            if crew.lost() is not None:
                group.abort()
                return

    watching = threading.Thread(target=watch, name="ranks", daemon=True)
    watching.start()
    try:
        return load_one(device=device, peers=group)
    except (RankLost, ConfigError) as error:
        if isinstance(error, RankLost) or crew.lost() is not None:
            crew.complain()
        raise
    finally:
        over.set()
        watching.join()


def open_mirrors(engine: Engine, files_of: Iterable[Iterator[int]]) -> list[Mirror]:
    """The memory of the other ranks, mapped from their exported files. Empty if rank 0's device cannot access it: the
    instance then takes part in no drop.
    """
    kv, pool = engine.memory.kv, engine.memory.pool
    needs = engine.implementation.needs(kv.shape.block_tokens)
    with contextlib.ExitStack() as undo:
        mirrors: list[Mirror] = []
        for files in files_of:
            try:
                backend = pool.backend.beside(files)
            except ConfigError as error:
                get_logger().warning("this instance takes part in no drop and no migration", why=str(error))
                return []
            mirrors.append(
                Mirror.open(
                    backend,
                    budget_bytes=pool.budget_bytes,
                    layers=needs.layers,
                    others=needs.others,
                    kv_shape=kv.shape,
                    extent_bytes=pool.extent_bytes,
                )
            )
            undo.callback(mirrors[-1].close)
        undo.pop_all()
        return mirrors


def _require_equal(engine: Engine, shares: Sequence[RankReady]) -> None:
    for rank, share in enumerate(shares, start=1):
        if share.block_count != engine.block_count:
            why = f"rank {rank} has room for {share.block_count} blocks and the first one for {engine.block_count}"
            raise ConfigError("tensor_parallel_size", f"{why}: their devices are not alike")
