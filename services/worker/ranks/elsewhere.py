"""Memory of a rank on another host. Rank 0 maps a mirror of it, and threads of that rank send and receive its bytes.

    MEMORY lane   KV; rank 0's engine thread
    LAYERS lane   parameters; other threads of rank 0

The mirror is host memory of rank 0 through which these bytes pass. Its pages are returned when its extents are moved.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.errors import BallastError
from ballast.service.logs import get_logger
from services.worker.memory.backend import Algorithm
from services.worker.memory.remote import Runs
from services.worker.ranks.channel import Done, Failed, RankChannel, RankEnded, RankLost

if TYPE_CHECKING:
    import torch

    from services.worker.engine.load import Engine
    from services.worker.memory.device import DeviceMemory

_ANSWER_S = 30.0
_READ_S = 1800.0  # time limit for reading a layer from disk


@dataclass(frozen=True, slots=True)
class _Blocks:
    layers: range
    runs: Runs


@dataclass(frozen=True, slots=True)
class _FetchBytes:
    """Request for bytes of this memory; answered with Done, followed by the bytes."""

    what: _Blocks | int  # or a layer's parameters


@dataclass(frozen=True, slots=True)
class _StoreBytes:
    """Request to write the bytes that follow to these blocks or this layer; answered with Done."""

    what: _Blocks | int


@dataclass(frozen=True, slots=True)
class _ChecksumWanted:
    """Request for a layer's checksum; answered with Done and the checksum."""

    layer: int
    by: Algorithm


@dataclass(frozen=True, slots=True)
class _ReadLayer:
    """Request to read a layer from the rank's own host; answered with Done or Failed."""

    layer: int


def _pieces(memory: DeviceMemory, what: _Blocks | int) -> Iterator[torch.Tensor]:
    """Yield views of the bytes to transfer: KV blocks of layers, or a layer's parameters, in the same order on both
    sides.
    """
    if isinstance(what, int):
        yield from memory.parameters.layer(what).values()
        return
    for layer in what.layers:
        for first, last in what.runs:
            yield memory.kv.layer(layer)[first:last]


class RemoteRank:
    """Rank 0's side: `RemoteKv` and `RemoteParameters`."""

    def __init__(self, image: DeviceMemory, kv: RankChannel, parameters: RankChannel) -> None:
        self._image = image
        self._kv, self._parameters = kv, parameters
        self._lock = threading.Lock()  # lock of the channel for parameters
        image.kv.remote = image.parameters.remote = self

    def fetch_kv(self, layers: range, runs: Runs) -> None:
        self._fetch(self._kv, _Blocks(layers, runs))

    def store_kv(self, layers: range, runs: Runs) -> None:
        self._store(self._kv, _Blocks(layers, runs))

    def fetch_layer(self, layer: int) -> None:
        with self._lock:
            self._fetch(self._parameters, layer)

    def store_layer(self, layer: int) -> None:
        with self._lock:
            self._store(self._parameters, layer)

    def layer_checksum(self, layer: int, by: Algorithm) -> bytes:
        with self._lock:
            answer = self._ask(self._parameters, _ChecksumWanted(layer, by), _READ_S)
        assert isinstance(answer, bytes)
        return answer

    def read_layer(self, layer: int) -> None:
        with self._lock:
            self._ask(self._parameters, _ReadLayer(layer), _READ_S)

    def _fetch(self, channel: RankChannel, what: _Blocks | int) -> None:
        self._ask(channel, _FetchBytes(what), _ANSWER_S)
        channel.receive_into(_pieces(self._image, what), _ANSWER_S)

    def _store(self, channel: RankChannel, what: _Blocks | int) -> None:
        channel.send(_StoreBytes(what), _ANSWER_S)
        channel.send_tensors(_pieces(self._image, what), _ANSWER_S)
        self._answer(channel, _ANSWER_S)

    def _ask(self, channel: RankChannel, message: object, within_s: float) -> object:
        channel.send(message, within_s)
        return self._answer(channel, within_s)

    def _answer(self, channel: RankChannel, within_s: float) -> object:
        answer = channel.receive(within_s)
        if isinstance(answer, Failed):
            raise OSError(answer.why)
        if not isinstance(answer, Done):
            raise RankLost(f"a rank on another host has answered {answer}")
        return answer.result


def serve(engine: Engine, lanes: Sequence[RankChannel]) -> None:
    """The other rank's side: run a thread for each lane. A failure of one of them ends this process."""
    for lane in lanes:
        threading.Thread(target=_serve_lane, args=(engine, lane), daemon=True, name="lane").start()


def _serve_lane(engine: Engine, channel: RankChannel) -> None:
    try:
        while True:
            _handle(engine, channel, channel.receive(None))
    except RankEnded:
        return
    except Exception as error:  # noqa: BLE001 rank 0 must learn of any
        get_logger().error("this rank ends", why=str(error) or type(error).__name__)
        os._exit(1)


def _handle(engine: Engine, channel: RankChannel, message: object) -> None:
    match message:
        case _FetchBytes(what):
            channel.send(Done(None), _ANSWER_S)
            channel.send_tensors(_pieces(engine.memory, what), _ANSWER_S)
        case _StoreBytes(what):
            channel.receive_into(_pieces(engine.memory, what), _ANSWER_S)
            channel.send(Done(None), _ANSWER_S)
        case _ChecksumWanted(layer, by):
            channel.send(Done(engine.memory.parameters.layer_checksum(layer, by=by)), _ANSWER_S)
        case _ReadLayer(layer):
            try:
                engine.read_layer(layer)
            except (OSError, BallastError) as error:
                channel.send(Failed("", str(error)), _ANSWER_S)
            else:
                channel.send(Done(None), _ANSWER_S)
        case _:
            raise RankLost(f"{message} is not a request to a rank on another host")
