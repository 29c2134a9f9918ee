"""Counts nested messages before parsing: 16 MiB can contain eight million empty ones, which take seconds to parse."""

from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

LARGE_BYTES: Final = 1 << 16  # messages up to this size are parsed without counting
MAX_MESSAGES: Final = 16_384  # limit on nested messages, all depths together
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


def has_too_many(data: bytes, descriptor: Descriptor) -> bool:
    """True if a message contains more than `MAX_MESSAGES` nested messages, or more than four times as many fields.

    False for malformed bytes, whose parsing fails early.
    """
    try:
        return _Walk(data).count(0, len(data), descriptor)
    except IndexError:  # truncated
        return False


class _Walk:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._messages_left = MAX_MESSAGES
        self._fields_left = 4 * MAX_MESSAGES

    def count(self, at: int, end: int, descriptor: Descriptor) -> bool:
        while at < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                return True
            tag, at = self._varint(at)
            kind = tag & 7
            if kind == _VARINT:
                _, at = self._varint(at)
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            elif kind == _DELIMITED:
                length, at = self._varint(at)
                field = descriptor.fields_by_number.get(tag >> 3)
                if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
                    self._messages_left -= 1
                    if self._messages_left < 0 or self.count(at, min(end, at + length), field.message_type):
                        return True
                at += length
            else:
                return False  # proto3 has no groups
        return False

    def _varint(self, at: int) -> tuple[int, int]:
        value, shift = 0, 0
        while True:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80 or shift > 63:
                return value, at
