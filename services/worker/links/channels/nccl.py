"""Channels for GPUs: frames over TCP, payloads over NCCL.

A receive that NCCL has been given occupies the device until its message comes, blocks whatever follows on the same
communicator, and keeps every device-wide synchronisation waiting, the one before unmapping memory included. So only
payloads go over NCCL, and their receives are posted when the frame in front has arrived; and each direction has a
communicator of its own, as otherwise a receive would stand in the way of a send.
"""

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
from torch.distributed import PrefixStore, Store, Work

from ballast.common.errors import ConfigError
from services.worker.links.channels.gloo import Group
from services.worker.links.channels.tcp import TcpChannel
from services.worker.links.ports import ChannelBroken, Channels, Pending
from services.worker.links.store import PairStore

_POLL_S = 0.00005


class NcclPending:
    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        # Work.wait() only makes the current stream wait; whether the bytes are there is asked for.
        deadline_s = time.monotonic() + timeout_s
        try:
            while not self._work.is_completed():
                if time.monotonic() > deadline_s:
                    raise ChannelBroken(f"payload not complete after {timeout_s} s")
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise ChannelBroken(str(error)) from error


class NcclChannel:
    def __init__(self, frames: TcpChannel, store: Store, rank: int, device: torch.device, timeout_s: float) -> None:
        from torch.distributed import ProcessGroupNCCL  # not part of a build for machines without GPUs

        self.device = device
        self._frames = frames
        self._peer = 1 - rank

        def communicator(direction: str) -> Group:
            options = ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_s)
            return cast(Group, ProcessGroupNCCL(PrefixStore(direction, store), rank, 2, options))

        upwards, downwards = communicator("up"), communicator("down")
        self._out, self._in = (upwards, downwards) if rank == 0 else (downwards, upwards)

    def send_frame(self, frame: torch.Tensor) -> Pending:
        return self._frames.send_frame(frame)

    def post_frame(self, buffer: torch.Tensor) -> Pending:
        return self._frames.post_frame(buffer)

    def send_payload(self, payload: torch.Tensor) -> NcclPending:
        return NcclPending(self._out.send([payload], self._peer, 0))

    def post_payload(self, buffer: torch.Tensor) -> NcclPending:
        return NcclPending(self._in.recv([buffer], self._peer, 0))

    def abort(self) -> None:
        self._frames.abort()
        self._out.abort()
        self._in.abort()

    def destroy(self) -> None:
        self._frames.destroy()
        self._out.shutdown()
        self._in.shutdown()


class NcclTransport:
    name = "nccl"
    lanes = ("store", "urgent", "bulk")

    def __init__(self, device: torch.device) -> None:
        if not torch.distributed.is_nccl_available():
            raise ConfigError("worker.transport", "this build of torch has no NCCL; use tcp or gloo")
        self._device = device

    def open(self, sockets: Sequence[socket.socket], name: str, rank: int, within_s: float) -> Channels:
        store = PairStore(sockets[0])  # which NCCL asks again when it first sends
        opened: list[NcclChannel] = []
        try:
            with store.expiring(time.monotonic() + within_s):
                for lane, connection in zip(self.lanes[1:], sockets[1:], strict=True):
                    prefix = PrefixStore(f"{name}/{lane}", store)
                    opened.append(NcclChannel(TcpChannel(connection), prefix, rank, self._device, 2 * within_s))
        except (RuntimeError, OSError) as error:
            for channel in opened:
                channel.abort()
                channel.destroy()
            store.close()
            raise ChannelBroken(f"{name}: {error}") from error
        return Channels(opened[0], opened[1], store.close)

    def close(self) -> None:
        """Nothing is shared."""
