"""`python -m services.worker.ranks SOCKET`: a rank other than 0, started and ended by rank 0. SOCKET is an inherited
file descriptor.

`... CONTROL MEMORY LAYERS TETHER FOLDER`: a rank on another host, started by `nodes.follow`. It ends with that process
or with rank 0. CONTROL, MEMORY and LAYERS are sockets to rank 0, TETHER is a socket to the process that has started it,
and FOLDER is the model's folder on this host.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
_LANES = 3  # `nodes.LANES`, if rank 0 is on another host


def _end_with(connections: Sequence[socket.socket]) -> None:
    """Exit as soon as rank 0 or the process that has started this one has ended, even in the middle of a step."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> None:
    numbers, folder = (sys.argv[1:-1], Path(sys.argv[-1])) if len(sys.argv) > 2 else (sys.argv[1:], None)
    connections = [socket.socket(fileno=int(number)) for number in numbers]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C by draining
    threading.Thread(target=_end_with, args=(connections,), daemon=True).start()
    channel, *lanes = [RankChannel(each, "the first rank") for each in connections[:_LANES]]
    start = cast(Start, channel.receive(None))  # no time limit: rank 0 may be waiting for other ranks
    if folder is not None:
        load_one = cast(functools.partial[Any], start.load_one)
        start = replace(start, load_one=functools.partial(load_one.func, folder, **load_one.keywords))
    log = start.log
    logs.configure(service="worker", instance=f"{log.instance}/rank-{start.rank}", level=log.level, form=log.form)
    try:
        _serve(channel, lanes, start)
    except ConfigError as error:
        channel.send(Failed(error.path, error.why), _ANSWER_S)
    except RankEnded:
        return
    except RankLost as error:
        logs.get_logger().error("this rank ends", why=str(error))
        sys.exit(1)


def _serve(channel: RankChannel, lanes: Sequence[RankChannel], start: Start) -> None:
    # Imported late, because they import torch, which is slow, and the end of rank 0 must already be noticed before
    # that.
    from services.worker.ranks import elsewhere
    from services.worker.ranks.group import meet
    from services.worker.ranks.runner import follow

    channel.send(Done(None), _ANSWER_S)
    group = meet(start)
    with start.load_one(device=start.devices[start.rank], peers=group) as engine:
        group.loading = False
        parameters = engine.memory.parameters
        elsewhere.serve(engine, lanes)
        channel.send(RankReady(engine.block_count, parameters.loaded_checksums, engine.info.revision), _ANSWER_S)
        while True:
            message = channel.receive(None)
            if isinstance(message, RunLayers):
                follow(engine, group, message)
            elif isinstance(message, Remap):
                channel.send(_remap(engine.memory, message), _ANSWER_S)
            elif isinstance(message, Export):
                _export(channel, engine.memory.pool.backend, message)


def _remap(memory: DeviceMemory, change: Remap) -> Done | MemoryRefused:
    if change.name != "undo":
        memory.begin()  # so that only this change is undone, even one that does not begin itself
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
