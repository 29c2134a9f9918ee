"""Loads a model as one instance of several ranks."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ballast.common.errors import ConfigError
from ballast.service.logs import get_logger
from services.worker.engine.choice import choose_model
from services.worker.engine.load import Engine
from services.worker.engine.peers import Apart
from services.worker.memory.backend import MemoryBackend
from services.worker.memory.host import HostBackend
from services.worker.memory.parameters import combined
from services.worker.ranks.channel import RankChannel, RankLog, RankLost, RankReady, Start
from services.worker.ranks.crew import Crew
from services.worker.ranks.elsewhere import RemoteRank
from services.worker.ranks.group import RankGroup, meet, open_store
from services.worker.ranks.memory import Mirror, RankedMemory
from services.worker.ranks.nodes import LAYERS, MEMORY, FarRank, NodeListener, Nodes
from services.worker.ranks.runner import RankedRunner

_WATCH_S = 0.2


@dataclass(frozen=True, slots=True)
class Ranked:
    """Rank 0's engine, which represents all ranks, and the processes of the other ranks."""

    engine: Engine
    crew: Crew
    group: RankGroup

    def lost(self) -> str | None:
        """Describe which other rank has ended and how, and abort collectives that wait for it; None: no rank has.
        Thread-safe.
        """
        if (who := self.crew.lost()) is not None:
            self.group.abort()
        return who

    @property
    def exchanges(self) -> bool:
        """True if KV and layers of all ranks can be moved, because rank 0 has their memory mapped, or a mirror of
        it.
        """
        return bool(self.engine.memory.kv.mirrors)

    @property
    def swaps(self) -> bool:
        """True if KV of all ranks can be copied to this host's memory."""
        return self.exchanges and not self.engine.memory.kv.is_remote


def load_ranked(
    load_one: functools.partial[Engine], devices: Sequence[str], log: RankLog, nodes: Nodes | None = None
) -> Ranked:
    """Load one rank on each of the devices, which are all GPUs or all CPUs; CPUs are listed once per rank. `load_one`:
    `load_engine` with the common arguments; memory sizes are per rank. `nodes`: the hosts, if there are several. Each
    has its own model folder and devices; `devices` are those of this host.

    Raises:
        ConfigError: as for `load_engine`; or heads or MLP are not divisible by the number of ranks.
        RankLost: the process of a rank has ended.
    """
    model_dir: Path = load_one.args[0]
    count = len(devices) if nodes is None else nodes.ranks
    told = load_one.keywords
    choose_model(  # raises for an unsupported model before any process is started
        model_dir,
        model_impl=told.get("model_impl", "auto"),
        dtype=told.get("dtype", "auto"),
        device=devices[0],
        kernels=told.get("kernels", "auto"),
        max_model_len=told.get("max_model_len"),
        peers=Apart(0, count),
        attention_backend=told.get("attention_backend", "auto"),
        batch_invariant=told.get("batch_invariant", False),
        kv_cache_dtype=told.get("kv_cache_dtype", "auto"),
        adapted=bool(told.get("lora_modules")),
    )
    with contextlib.ExitStack() as files, contextlib.ExitStack() as undo:
        far = {} if nodes is None else NodeListener(nodes).gather()
        undo.callback(lambda: [each.close() for each in far.values()])
        crew = Crew(count, far)
        undo.callback(crew.close)
        if far:
            host = far[len(devices)].from_host
            store, meeting = open_store(host)  # must stay alive in this frame until all ranks have met
            devices = [*devices, *(far[rank].device for rank in range(len(devices), count))]
        else:
            folder = files.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            host, store, meeting = "127.0.0.1", None, str(Path(folder) / "ranks")
        start = Start(0, devices, count - len(far), meeting, host, log, load_one)
        crew.start(start)
        group = meet(start, store)
        engine = _load_first(load_one, devices[0], crew, group)
        undo.callback(engine.close)
        shares = crew.loaded()
        group.loading = False
        _require_equal(engine, shares)
        mirrors = open_mirrors(engine, [crew.files(rank) for rank in range(1, start.share)])
        if far:
            mirrors = [*mirrors, *_open_images(engine, far)] if len(mirrors) + 1 == start.share else []
        undo.callback(lambda: [mirror.close() for mirror in mirrors])
        store = engine.memory.parameters
        for layer, own in store.loaded_checksums.items():
            store.loaded_checksums[layer] = combined([own, *(share.checksums[layer] for share in shares)])
        memory = RankedMemory(engine.memory, mirrors, crew, count)
        undo.pop_all()
        return Ranked(replace(engine, memory=memory, runner=RankedRunner(engine, crew, group)), crew, group)


def _load_first(load_one: functools.partial[Engine], device: str, crew: Crew, group: RankGroup) -> Engine:
    """Load rank 0's shard. Loading is aborted if another rank ends."""
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
    """Map the memory of the other ranks from their exported files. Empty if rank 0's device cannot access it, in which
    case the instance cannot take part in drops.
    """
    with contextlib.ExitStack() as undo:
        mirrors: list[Mirror] = []
        for files in files_of:
            try:
                backend = engine.memory.pool.backend.beside(files)
            except ConfigError as error:
                get_logger().warning("this instance takes part in no drop and no migration", why=str(error))
                return []
            mirrors.append(_open_mirror(engine, backend))
            undo.callback(mirrors[-1].close)
        undo.pop_all()
        return mirrors


def _open_images(engine: Engine, far: Mapping[int, FarRank]) -> list[Mirror]:
    """Like `open_mirrors`, for ranks on other hosts."""
    if engine.memory.pool.backend.device.type != "cpu":
        get_logger().warning(
            "this instance takes part in no drop and no migration", why="its GPUs are on several hosts"
        )
        return []
    with contextlib.ExitStack() as undo:
        images: list[Mirror] = []
        for rank, each in sorted(far.items()):
            images.append(_open_mirror(engine, HostBackend(sparse=True)))
            undo.callback(images[-1].close)
            name = f"rank {rank} on {each.host}"
            RemoteRank(images[-1], RankChannel(each.lanes[MEMORY], name), RankChannel(each.lanes[LAYERS], name))
        undo.pop_all()
        return images


def _open_mirror(engine: Engine, backend: MemoryBackend) -> Mirror:
    kv, pool = engine.memory.kv, engine.memory.pool
    needs = engine.implementation.needs(kv.shape.block_tokens)
    return Mirror.open(
        backend,
        budget_bytes=pool.budget_bytes,
        layers=needs.layers,
        others=needs.others,
        kv_shape=kv.shape,
        extent_bytes=pool.extent_bytes,
    )


def _require_equal(engine: Engine, shares: Sequence[RankReady]) -> None:
    for rank, share in enumerate(shares, start=1):
        if share.revision != engine.info.revision:
            why = f"rank {rank} has a different checkpoint: its config.json or its files differ ({share.revision})"
            raise ConfigError("worker.model", f"{why} from the first host's ({engine.info.revision})")
        if share.block_count != engine.block_count:
            why = f"rank {rank} has room for {share.block_count} blocks, but rank 0 for {engine.block_count}"
            raise ConfigError("tensor_parallel_size", f"{why}: their devices differ")
