"""Channels for GPUs: frames over gloo, payloads over NCCL.

A receive that NCCL has been given occupies the device until its message comes, blocks whatever follows on the same
communicator, and keeps every device-wide synchronisation waiting, the one before unmapping memory included. So only
payloads go over NCCL, and their receives are posted when the frame in front has arrived; and each direction has a
communicator of its own, as otherwise a receive would stand in the way of a send.
"""

import time
from datetime import timedelta
from typing import cast

import torch
from torch.distributed import PrefixStore, Store, Work

from ballast.common.errors import ConfigError
from services.worker.links.channel import ChannelBroken, Group
from services.worker.links.channels.gloo import GlooChannel, GlooPending, GlooTransport

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
    def __init__(self, frames: GlooChannel, store: Store, rank: int, device: torch.device, timeout_s: float) -> None:
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

    def send_frame(self, frame: torch.Tensor) -> GlooPending:
        return self._frames.send_frame(frame)

    def post_frame(self, buffer: torch.Tensor) -> GlooPending:
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
    def __init__(self, host: str, device: torch.device) -> None:
        if not torch.distributed.is_nccl_available():
            raise ConfigError("transport", "this build of torch has no NCCL; use gloo")
        self._gloo = GlooTransport(host)
        self._device = device

    def open(self, store: Store, name: str, rank: int, timeout_s: float) -> NcclChannel:
        frames = self._gloo.open(store, name, rank, timeout_s)
        try:
            return NcclChannel(frames, PrefixStore(name, store), rank, self._device, timeout_s)
        except RuntimeError as error:
            frames.abort()
            frames.destroy()
            raise ChannelBroken(f"{name}: {error}") from error

    def close(self) -> None:
        self._gloo.close()
