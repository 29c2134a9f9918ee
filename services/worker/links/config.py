"""Settings of links, the same for all links of a worker."""

from dataclasses import dataclass, replace
from typing import Self

from ballast.common.errors import ConfigError
from services.worker.memory.backend import SLOT_BYTES

HEADER_BYTES = 64
_LEAST_ON_DEVICE_BYTES = 1 << 20
_BACKGROUND_SHARE_ON_DEVICE = 0.5
_NAIVE_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    port: int = 0  # port for the rendezvous; 0: any free one
    # Bulk.
    chunk_bytes: int = 512 * 1024  # initial size; later it depends on the measured speed of link and stage, see `pace`
    least_chunk_bytes: int = 256 * 1024
    most_chunk_bytes: int = 8 * 1024 * 1024
    window_chunks: int = 4  # bulk chunks in flight while no activations are sent
    calm_s: float = 0.2  # time without activations after which `window_chunks` applies
    bandwidth_bytes_per_s: float | None = None  # bulk bandwidth of a link, from a profile; refined by measurement
    hold_s: float = 0.005  # maximum time for which urgent traffic delays one chunk
    patience_chunks: int = 64  # chunks of higher classes after which a waiting lower class gets one
    background_share: float = 0.15  # fraction of time for sending parameters, which takes processor time from serving
    background_chunk_bytes: int = 2 * 1024 * 1024  # maximum chunk of parameters; smaller chunks wake threads too often
    rate_bytes_per_s: float | None = None  # emulates a slower link, both lanes together; None: unlimited
    sized_by_device: bool = True  # for a GPU, chunks have the size of one slot instead of the sizes above
    urgent_first: bool = True  # False: an emulated link keeps the order of arrival, as a baseline
    # Frames: a header, meta and, if it fits, the payload, in one message whose receive is posted in advance.
    urgent_inline_bytes: int = 64 * 1024
    bulk_inline_bytes: int = 4 * 1024
    posted_frames: int = 4  # receives posted in advance on each lane
    # Bounds.
    max_message_bytes: int = 1 << 30  # maximum size of one urgent message, such as the activations of a whole step
    max_transfer_bytes: int = 1 << 40
    max_queued_messages: int = 256
    max_queued_bytes: int = 2 << 30  # maximum size of urgent messages not yet sent
    max_transfers: int = 1024  # maximum unfinished transfers in each direction
    urgent_window: int = 8  # maximum urgent messages in flight
    # Waits.
    connect_timeout_s: float = 10.0  # time for a peer to connect
    open_timeout_s: float = 5.0  # maximum time until both sides have opened their channels after the rendezvous
    send_timeout_s: float = 10.0  # maximum time from posting a message or chunk to its completion
    keepalive_s: float = 1.0
    silence_timeout_s: float = 10.0  # a peer that sends nothing for that long counts as lost
    close_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        at_least_one = ("chunk_bytes", "least_chunk_bytes", "window_chunks", "patience_chunks", "posted_frames")
        for name in (*at_least_one, "max_transfers", "background_chunk_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"transport.{name}", f"must be at least 1, got {getattr(self, name)}")
        if self.keepalive_s * 2 > self.silence_timeout_s:
            raise ConfigError(
                "transport.silence_timeout_s", f"must be at least twice keepalive_s ({self.keepalive_s} s)"
            )
        if self.most_chunk_bytes < self.least_chunk_bytes:
            raise ConfigError("transport.most_chunk_bytes", f"must not be less than {self.least_chunk_bytes}")
        for name in ("rate_bytes_per_s", "bandwidth_bytes_per_s"):
            if (rate := getattr(self, name)) is not None and rate <= 0:
                raise ConfigError(f"transport.{name}", f"must be positive, got {rate}")
        if not 0.0 < self.background_share <= 1.0:
            raise ConfigError("transport.background_share", f"must be in (0, 1], got {self.background_share}")
        if min(self.urgent_inline_bytes, self.bulk_inline_bytes) < 0:
            raise ConfigError("transport.urgent_inline_bytes", "and bulk_inline_bytes must not be negative")

    def naive(self) -> Self:
        """Return these settings as a baseline: bulk in large pieces, in order of arrival, without priorities."""
        whole = min(_NAIVE_CHUNK_BYTES, self.max_message_bytes)
        return replace(
            self,
            chunk_bytes=whole,
            least_chunk_bytes=whole,
            most_chunk_bytes=whole,
            window_chunks=1,
            hold_s=0.0,
            background_share=1.0,
            background_chunk_bytes=whole,
            urgent_first=False,
            sized_by_device=False,
        )

    def on_device(self) -> Self:
        """Return these settings adapted to GPU memory. Chunks have the size of one slot, because each costs a copy, an
        event and a message. Parameters get a larger share, because sending them takes no processor time from serving.
        """
        if not self.sized_by_device:
            return self
        return replace(
            self,
            chunk_bytes=SLOT_BYTES,
            least_chunk_bytes=_LEAST_ON_DEVICE_BYTES,
            most_chunk_bytes=SLOT_BYTES,
            background_share=max(self.background_share, _BACKGROUND_SHARE_ON_DEVICE),
            background_chunk_bytes=SLOT_BYTES,
        )

    def frame_bytes(self, *, urgent: bool) -> int:
        """Return the size of a posted receive: the size of the largest frame that the peer may send."""
        return HEADER_BYTES + (self.urgent_inline_bytes if urgent else self.bulk_inline_bytes)
