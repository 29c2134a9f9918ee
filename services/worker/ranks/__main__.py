"""`python -m services.worker.ranks SOCKET`: a rank other than 0, started and ended by rank 0. SOCKET is an inherited
file descriptor.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ballast.common.errors import ConfigError
from ballast.service import logs
from services.worker.ranks.channel import (
    REFUSALS,
    Done,
    Export,
    Failed,
    MemoryRefused,
    RankChannel,
    RankEnded,
    RankLost,
    RankReady,
    Remap,
    RunLayers,
    Start,
)

if TYPE_CHECKING:
    from services.worker.memory.backend import MemoryBackend
    from services.worker.memory.device import DeviceMemory

_ANSWER_S = 30.0


def _end_with(connection: socket.socket) -> None:
    """Exit when rank 0 is gone, whatever this process is doing."""
    poll = select.poll()
    poll.register(connection, 0)  # hang-ups are reported anyway
    poll.poll()
    os._exit(0)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which drains
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    channel = RankChannel(connection, "the first rank")
    start = cast(Start, channel.receive(_ANSWER_S))
    log = start.log
    logs.configure(service="worker", instance=f"{log.instance}/rank-{start.rank}", level=log.level, form=log.form)
    try:
        _serve(channel, start)
    except ConfigError as error:
        channel.send(Failed(error.path, error.why), _ANSWER_S)
    except RankEnded:
        return
    except RankLost as error:
        logs.get_logger().error("this rank ends", why=str(error))
        sys.exit(1)


def _serve(channel: RankChannel, start: Start) -> None:
    # Imported late: torch is slow to load, and rank 0's end must be noticed meanwhile.
    import torch

    from services.worker.ranks.group import meet
    from services.worker.ranks.runner import follow

    channel.send(Done(None), _ANSWER_S)
    group = meet(Path(start.meeting), start.rank, [torch.device(device) for device in start.devices])
    with start.load_one(device=start.devices[start.rank], peers=group) as engine:
        parameters = engine.memory.parameters
        channel.send(RankReady(engine.block_count, parameters.loaded_checksums), _ANSWER_S)
        while True:
            message = channel.receive(None)
            if isinstance(message, RunLayers):
                follow(engine, group, message)
            elif isinstance(message, Remap):
                channel.send(_remap(engine.memory, message), _ANSWER_S)
            elif isinstance(message, Export):
                _export(channel, engine.memory.pool.backend, message)


def _remap(memory: DeviceMemory, change: Remap) -> Done | MemoryRefused:
    try:
        result = getattr(memory, change.name)(*change.arguments, **change.named)
        memory.pool.backend.synchronise()
    except REFUSALS as error:
        return MemoryRefused(f"{type(error).__name__}: {error}")
    return Done(result)


def _export(channel: RankChannel, backend: MemoryBackend, wanted: Export) -> None:
    try:
        files = backend.export(wanted.first, wanted.count)
    except ConfigError as error:
        channel.send(Failed(error.path, error.why), _ANSWER_S)
        return
    channel.send(Done(len(files)), _ANSWER_S)
    if files:
        channel.send_files(files, _ANSWER_S)


if __name__ == "__main__":
    main()
