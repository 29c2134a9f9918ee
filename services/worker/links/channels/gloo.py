"""Channels over gloo: one two-rank process group each, made directly and not part of any world."""

import re
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from ballast.common.errors import ConfigError
from services.worker.links.ports import ChannelBroken, Channels
from services.worker.links.store import PairStore

_FRAMES, _PAYLOADS, _NEVER_SENT = 0, 1, 2  # tags; messages of one tag stay in order

_SOURCE_PLACE = re.compile(r"^\[\S+\] ")


_LANES = ("act", "bulk")


class Group(Protocol):
    """The part of a process group that is used here; torch's stubs leave it out."""

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> Work: ...

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


class GlooPending:
    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        # Completion cannot be polled, and a wait whose time is up closes the connection: it is never tried again.
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ChannelBroken(_first_line(error)) from error


class GlooChannel:
    def __init__(self, group: Group, rank: int) -> None:
        self._group: Group | None = group
        self._peer = 1 - rank
        self.device = torch.device("cpu")

    def send_frame(self, frame: torch.Tensor) -> GlooPending:
        return self._send(frame, _FRAMES)

    def post_frame(self, buffer: torch.Tensor) -> GlooPending:
        return self._post(buffer, _FRAMES)

    def send_payload(self, payload: torch.Tensor) -> GlooPending:
        return self._send(payload, _PAYLOADS)

    def post_payload(self, buffer: torch.Tensor) -> GlooPending:
        return self._post(buffer, _PAYLOADS)

    def abort(self) -> None:
        # A receive that times out closes the connection with everything that is pending on it. The group's own
        # abort() leaves pending receives waiting.
        try:
            self._post(torch.empty(1, dtype=torch.uint8), _NEVER_SENT).wait(0.001)
        except ChannelBroken:
            return

    def destroy(self) -> None:
        self._group = None

    def _open_group(self) -> Group:
        if self._group is None:
            raise ChannelBroken("destroyed")
        return self._group

    def _send(self, tensor: torch.Tensor, tag: int) -> GlooPending:
        try:
            return GlooPending(self._open_group().send([tensor], self._peer, tag))
        except RuntimeError as error:
            raise ChannelBroken(_first_line(error)) from error

    def _post(self, tensor: torch.Tensor, tag: int) -> GlooPending:
        try:
            return GlooPending(self._open_group().recv([tensor], self._peer, tag))
        except RuntimeError as error:
            raise ChannelBroken(_first_line(error)) from error


class GlooTransport:
    """`host` is a name or address of this machine that peers reach it by; no lookup of the machine's own name."""

    name = "gloo"
    lanes = ("store",)

    def __init__(self, host: str) -> None:
        try:
            self._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        except RuntimeError as error:
            raise ConfigError("advertise_host", f"{host!r} is no address of this machine: {error}") from error

    def open(self, sockets: Sequence[socket.socket], name: str, rank: int, within_s: float) -> Channels:
        """Both have come, so this takes milliseconds, or something is wrong with one of them.

        Whoever has the other's addresses connects at once, and waits for longer than the other one may take to get
        its own: gloo forgets a connection that it has given up, but not that one was to come, and the process ends
        with a segmentation fault if it comes after all.
        """
        store = PairStore(sockets[0])
        opened: list[GlooChannel] = []
        try:
            with store.expiring(time.monotonic() + within_s):
                opened.extend(self.open_one(store, f"{name}/{lane}", rank, 2 * within_s) for lane in _LANES)
        except BaseException:
            for channel in opened:
                channel.abort()
                channel.destroy()
            store.close()
            raise
        return Channels(opened[0], opened[1], store.close)

    def open_one(self, store: Store, name: str, rank: int, timeout_s: float) -> GlooChannel:
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] the stubs call it Options
        options._devices = list(self._devices)
        options._threads = 1
        options._timeout = timedelta(seconds=timeout_s)
        try:
            group = ProcessGroupGloo(PrefixStore(name, store), rank, 2, options)
            return GlooChannel(cast(Group, group), rank)
        except (RuntimeError, OSError) as error:
            raise ChannelBroken(f"{name}: {_first_line(error)}") from error

    def close(self) -> None:
        self._devices.clear()


def _first_line(error: BaseException) -> str:
    """What happened, without where in gloo's source and without its advice."""
    return _SOURCE_PLACE.sub("", str(error).split("\n", 1)[0]).split(". This is", 1)[0]
