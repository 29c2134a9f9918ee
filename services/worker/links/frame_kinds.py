"""Types of frames on a link."""

from enum import IntEnum


class FrameKind(IntEnum):
    MESSAGE = 1  # urgent: meta and one tensor
    OPENING = 2  # bulk: a transfer begins
    CHUNK = 3  # bulk: bytes [offset, offset + payload) of a transfer
    CANCEL = 4  # bulk: no more chunks of this transfer
    DELIVERED = 5  # urgent, to the transfer's sender: all bytes have arrived
    REFUSED = 6  # urgent, to the transfer's sender: the transfer is refused; meta has the reason
    KEEPALIVE = 7
    CLOSE = 8  # the last frame on its lane
    JOIN = 9  # urgent: the sender is in this epoch from now on
    LEAVE = 10  # urgent: the sender no longer takes part; stream 1: it did not know that the receiver does
