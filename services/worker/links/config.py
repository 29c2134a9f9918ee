"""How links behave. One value for all links of a worker."""

from dataclasses import dataclass, replace
from typing import Self

from ballast.common.errors import ConfigError
from services.worker.memory.backend import SLOT_BYTES

HEADER_BYTES = 64
_LEAST_ON_DEVICE_BYTES = 1 << 20
_BACKGROUND_SHARE_ON_DEVICE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    port: int = 0  # where peers find this worker, and all that comes from them; 0: any free one
    # Bulk.
    chunk_bytes: int = 512 * 1024  # until the speed of the link and of the stage are known, see `pace`
    least_chunk_bytes: int = 256 * 1024
    most_chunk_bytes: int = 8 * 1024 * 1024
    window_chunks: int = 4  # bulk chunks in flight on a link, while no activations flow
    calm_s: float = 0.2  # without activations, until they are taken not to flow
    bandwidth_bytes_per_s: float | None = None  # of a link's bulk, from a profile; measured while it is used
    hold_s: float = 0.005  # longest time bulk stands back for urgent traffic before one chunk goes anyway
    patience_chunks: int = 64  # chunks of higher classes after which a waiting lower class gets one
    background_share: float = 0.15  # of the time in which parameters are sent; a processor that does it is not serving
    background_chunk_bytes: int = 2 * 1024 * 1024  # of parameters, at most; smaller ones wake threads up too often
    rate_bytes_per_s: float | None = None  # emulates a slower link, both lanes together; None: as fast as it goes
    sized_by_device: bool = True  # a GPU's bulk in chunks of a slot, whatever is said above
    urgent_first: bool = True  # False: over an emulated link in order of arrival, to measure against
    # Frames: a header, then meta and, if it fits, the payload, in one message whose receive is posted in advance.
    urgent_inline_bytes: int = 64 * 1024
    bulk_inline_bytes: int = 4 * 1024
    posted_frames: int = 4  # receives posted in advance on each lane
    # Bounds.
    max_message_bytes: int = 64 * 1024 * 1024  # one urgent message
    max_transfer_bytes: int = 1 << 40
    max_queued_messages: int = 256
    max_queued_bytes: int = 256 * 1024 * 1024  # urgent messages not yet sent
    max_transfers: int = 1024  # unfinished, in each direction
    urgent_window: int = 8  # urgent messages in flight
    # Waits.
    connect_timeout_s: float = 10.0  # for a peer to come
    open_timeout_s: float = 5.0  # for both, once they have met, to open their channels
    send_timeout_s: float = 10.0  # for one message or chunk, from posting to completion
    keepalive_s: float = 1.0
    silence_timeout_s: float = 10.0  # a peer that sends nothing for so long is gone
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
        """To measure against: bulk in whole pieces, in the order in which things come, behind nothing."""
        whole = self.max_message_bytes
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
        """The same for memory of a GPU: chunks of a slot, as each costs it a copy, an event and a message. Sending does
        not take the processors that serve.
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
        """Size of a posted receive; the largest frame that may be sent to us."""
        return HEADER_BYTES + (self.urgent_inline_bytes if urgent else self.bulk_inline_bytes)
