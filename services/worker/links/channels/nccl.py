"""Channels for GPUs: frames and host payloads over TCP, device payloads over NCCL.

A pair of workers has one communicator, created with the link, which takes up to a second and uses device memory.
`turns` explains how two lanes share it. A receive posted to NCCL occupies the device until its message arrives, and
blocks every device-wide synchronisation, including the one before unmapping memory. Therefore only payloads use NCCL,
and both sides are ready before either posts.

torch's watchdog, which ends the process when a peer dies, is disabled, because links have their own timeouts.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Protocol, cast

import torch
from torch.distributed import PrefixStore, Store, Work

from ballast.common.errors import ConfigError
from services.worker.links.channels.tcp import TcpChannel
from services.worker.links.channels.turns import ChannelTurns, Lane
from services.worker.links.copies import HOST
from services.worker.links.ports import ChannelBroken, Channels, Pending
from services.worker.links.store import PairStore

# Device memory. The first communicator of a process, of a single rank, took 310 MiB on an H200, including what NCCL
# loads once (benchmarks/results/2026-11-26-gpu-first.md). 64 MiB for each pair is an estimate, for `_MOST_CTAS` blocks.
FIRST_BYTES, COMMUNICATOR_BYTES = 310 << 20, 64 << 20
_MOST_CTAS = 4  # maximum thread blocks of a communicator; two already saturate a 400 Gb/s link

# Disables torch's reactions to a failed or late collective, which end the process.
UNWATCHED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_EVER = timedelta(hours=1)  # links have their own timeouts


class NcclGroup(Protocol):
    """The methods of ProcessGroupNCCL used here, which torch's stubs lack."""

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def _start_coalescing(self) -> None: ...

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> Work: ...

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> Work: ...

    def _end_coalescing(self) -> Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


class NcclStream(Protocol):
    """The CUDA stream that orders a communicator's payloads."""

    def current(self) -> AbstractContextManager[object]: ...

    def finish(self, work: Work) -> None:
        """Block until the device has completed `work`, successfully or not."""
        ...


class NcclMover:
    """A communicator as a `turns.TurnMover`."""

    def __init__(self, group: NcclGroup, stream: NcclStream, rank: int) -> None:
        self._group = group
        self._stream = stream
        self._peer = 1 - rank

    def move(self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        with self._stream.current():
            self._group._start_coalescing()
            for payload in out:
                self._group.send([payload], self._peer, 0)
            for payload in into:
                self._group.recv([payload], self._peer, 0)
            work = self._group._end_coalescing()
            self._stream.finish(work)
            work.wait(_EVER)  # raises if it failed; completion alone does not mean success

    def abort(self) -> None:
        self._group.abort()

    def destroy(self) -> None:
        self._group.shutdown()


class CudaStream:
    """A separate stream, so that a payload does not wait for unrelated kernels. Links wait until the payload is
    computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def finish(self, work: Work) -> None:
        work.synchronize()  # blocks the stream, not this thread
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()  # sleeps in the driver, without the GIL


class NcclChannel:
    """One lane, a `links.ports.Channel`."""

    def __init__(self, frames: TcpChannel, turns: ChannelTurns, lane: Lane, device: torch.device) -> None:
        self.device = device
        self._frames = frames
        self._turns = turns
        self._lane = lane

    def send_frame(self, frame: torch.Tensor) -> Pending:
        return self._frames.send_frame(frame)

    def post_frame(self, buffer: torch.Tensor) -> Pending:
        return self._frames.post_frame(buffer)

    def send_payload(self, payload: torch.Tensor) -> Pending:
        if payload.device == HOST:
            return self._frames.send_payload(payload)
        return self._turns.send(self._lane, payload)

    def post_payload(self, buffer: torch.Tensor) -> Pending:
        if buffer.device == HOST:
            return self._frames.post_payload(buffer)
        return self._turns.receive(self._lane, buffer)

    def abort(self) -> None:
        self._frames.abort()
        self._turns.abort()

    def destroy(self) -> None:
        self._frames.destroy()
        self._turns.destroy()


class NcclTransport:
    """Transport for one GPU. `make_group` and `make_stream` are replaceable for tests."""

    name = "nccl"
    lanes = ("store", "turns", "urgent", "bulk")

    def __init__(
        self,
        device: torch.device,
        make_group: Callable[[Store, int, float], NcclGroup] | None = None,
        make_stream: Callable[[torch.device], NcclStream] = CudaStream,
    ) -> None:
        if make_group is None and device.type != "cuda":
            raise ConfigError("worker.transport", f"nccl transfers GPU memory, not that of {device}; use tcp")
        if make_group is None and not torch.distributed.is_nccl_available():
            raise ConfigError("worker.transport", "this build of torch has no NCCL; use tcp")
        self._device = device
        self._make_group = make_group or partial(_nccl_group, device)
        self._make_stream = make_stream
        os.environ.update(UNWATCHED)  # read when a group is created

    def open(self, sockets: Sequence[socket.socket], name: str, rank: int, within_s: float) -> Channels:
        store_socket, turns_socket, *lanes = sockets
        store = PairStore(store_socket)
        group: NcclGroup | None = None
        try:
            with store.expiring(time.monotonic() + within_s):
                group = self._make_group(PrefixStore(name, store), rank, 2 * within_s)
                group.eager_connect_single_device(self._device)
        except (RuntimeError, OSError, ChannelBroken) as error:
            if group is not None:
                group.abort()
            store.close()
            raise ChannelBroken(f"{name}: {error}") from error
        turns = ChannelTurns(turns_socket, NcclMover(group, self._make_stream(self._device), rank), rank, name)
        urgent, bulk = (
            NcclChannel(TcpChannel(connection), turns, lane, self._device)
            for lane, connection in zip(Lane, lanes, strict=True)
        )
        return Channels(urgent, bulk, store.close)

    def close(self) -> None:
        """Does nothing."""


def refuse_one_device(store: Store, rank: int, uuid: str) -> None:
    """Detect two ranks on the same device early, because NCCL reports it late and less clearly.

    Raises:
        ChannelBroken: both sides have the same device.
    """
    store.set(f"device {rank}", uuid)
    if store.get(f"device {1 - rank}") == uuid.encode():
        raise ChannelBroken(f"both workers are on GPU {uuid}, which NCCL refuses: set --transport tcp for both")


def _nccl_group(device: torch.device, store: Store, rank: int, timeout_s: float) -> NcclGroup:
    from torch.distributed import ProcessGroupNCCL  # missing in torch builds without GPU support

    refuse_one_device(store, rank, str(torch.cuda.get_device_properties(device).uuid))
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.max_ctas = _MOST_CTAS
    return cast(NcclGroup, ProcessGroupNCCL(store, rank, 2, options))
