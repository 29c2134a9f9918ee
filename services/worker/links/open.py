"""Opens the data plane of a worker with real tensors."""

import socket
from collections.abc import Sequence

import torch

from ballast.common.errors import ConfigError
from services.worker.links.channel_connection import ChannelConnection
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Receiver
from services.worker.links.copies import HOST, Copies
from services.worker.links.cuda_copies import copies_for
from services.worker.links.frame import VERSION
from services.worker.links.handshake import Hello, Terms
from services.worker.links.pace import StagePace
from services.worker.links.plane import DataPlane
from services.worker.links.ports import Transport
from services.worker.links.reaper import Reaper
from services.worker.links.rendezvous import resolve_host
from services.worker.memory.backend import SLOT_BYTES

_MOST_LINKS = 8  # links for which memory is reserved: to members of the group, and to sources and targets of migrations


def open_plane(
    worker_id: str,
    receiver: Receiver,
    config: TransportConfig,
    advertise_host: str | None = None,
    transport: Transport | str = "auto",
    secret: bytes | None = None,
    device: torch.device = HOST,
) -> DataPlane:
    """Open the data plane; see `DataPlane`. `transport`: an object or a name. `device`: of the tensors to transfer.

    Raises:
        ConfigError: the transport is unknown, or the host is invalid.
    """
    host, pace, copies = resolve_host(advertise_host), StagePace(), copies_for(device)
    if device != HOST:
        config = config.on_device()
        copies.warm()
    chosen = _transport(transport, device) if isinstance(transport, str) else transport
    opener = _ChannelOpener(worker_id, receiver, config, chosen, pace, copies)
    return DataPlane(
        worker_id, opener, host=host, pace=pace, secret=secret, timeout_s=config.connect_timeout_s, port=config.port
    )


def carrier_of(name: str, device_type: str) -> str:
    """Return the name of the transport: the configured one, or for "auto" the one for this device. No other code
    chooses it.
    """
    if name != "auto":
        return name
    return "nccl" if device_type == "cuda" and torch.distributed.is_nccl_available() else "tcp"


def device_bytes(name: str, device: str, ranks: int = 1) -> int:
    """Return the estimated maximum of device memory used by links and by NCCL, which is reserved in addition to
    parameters and KV. `device`: as in the setting (cpu, cuda, cuda:1, cuda:auto). `ranks`: ranks of the instance;
    several of them also use NCCL for all-reduces.
    """
    device_type = device.partition(":")[0]
    carrier = carrier_of(name, device_type)
    if device_type == "cpu":
        return 0
    slots_bytes = SLOT_BYTES * (2 if carrier == "tcp" else 2 * TransportConfig().window_chunks)
    from services.worker.links.channels.nccl import COMMUNICATOR_BYTES, FIRST_BYTES

    has_nccl = carrier == "nccl"
    process_bytes = FIRST_BYTES if has_nccl or ranks > 1 else 0
    return process_bytes + _MOST_LINKS * ((COMMUNICATOR_BYTES if has_nccl else 0) + slots_bytes)


def _transport(name: str, device: torch.device) -> Transport:
    match carrier_of(name, device.type):
        case "tcp":
            from services.worker.links.channels.tcp import TcpTransport

            return TcpTransport()
        case "nccl":
            from services.worker.links.channels.nccl import NcclTransport

            return NcclTransport(device)
        case _:
            raise ConfigError("worker.transport", f"must be auto, tcp or nccl, got {name!r}")


class _ChannelOpener:
    def __init__(
        self,
        worker_id: str,
        receiver: Receiver,
        config: TransportConfig,
        transport: Transport,
        pace: StagePace,
        copies: Copies,
    ) -> None:
        self._receiver = receiver
        self._config = config
        self._transport = transport
        self._pace = pace
        self._copies = copies
        self._reaper = Reaper(f"links-reaper-{worker_id}")

    @property
    def lanes(self) -> tuple[str, ...]:
        return self._transport.lanes

    @property
    def terms(self) -> Terms:
        return Terms(
            version=VERSION,
            transport=self._transport.name,
            urgent_frame_bytes=self._config.frame_bytes(urgent=True),
            bulk_frame_bytes=self._config.frame_bytes(urgent=False),
            max_message_bytes=self._config.max_message_bytes,
            max_transfer_bytes=self._config.max_transfer_bytes,
        )

    def open(self, peer: Hello, sockets: Sequence[socket.socket], *, is_host: bool, name: str) -> ChannelConnection:
        channels = self._transport.open(sockets, name, 0 if is_host else 1, self._config.open_timeout_s)
        try:
            return ChannelConnection(
                peer, channels, self._config, self._receiver, self._reaper.submit, self._pace, self._copies
            )
        except BaseException:
            for channel in (channels.urgent, channels.bulk):
                channel.abort()
                channel.destroy()
            channels.close()
            raise

    def close(self, timeout_s: float) -> bool:
        ended = self._reaper.close(timeout_s)
        self._copies.close()
        self._transport.close()
        return ended
