"""Sizes, times, counts and layers as text, the same everywhere: bytes in powers of 1024, layer
ranges with both ends.
"""

import math
import re
from collections.abc import Sequence

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}


def human_bytes(size_bytes: float, *, signed: bool = False) -> str:
    """Format bytes: 1536 -> '1.5 KiB'."""
    power = min(int(math.log(abs(size_bytes), 1024)), 5) if abs(size_bytes) >= 1024 else 0
    return f"{size_bytes / 1024**power:{'+' if signed else ''}.{1 if power else 0}f} {_BYTE_UNITS[power]}"


def parse_bytes(text: str) -> int:
    """Parse bytes: '512MiB', '16 GiB', '1.5GB' or a plain number.

    Raises:
        ValueError: the text is not a positive size; the message shows accepted forms.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _SIZES:
        raise ValueError(f"must be a size such as 512MiB or 16GiB, got {text!r}")
    size_bytes = int(float(found[1]) * _SIZES[found[2].lower()])
    if size_bytes < 1:
        raise ValueError(f"must be at least one byte, got {text!r}")
    return size_bytes


def human_count(number: int) -> str:
    """Format a count: 1536 -> '1.5 thousand'."""
    for size, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= size:
            return f"{number / size:.1f} {name}"
    return str(number)


def thousands(count: int) -> str:
    """Format a count in thousands: 3100 -> '3.1k', 310 -> '310'."""
    return str(count) if count < 1000 else f"{count / 1000:.1f}k"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: (1, 'GPU') -> '1 GPU', (2, 'GPU') -> '2 GPUs'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def human_duration(duration_s: float) -> str:
    """Format a duration: 3725 -> '1 h 2 min'."""
    whole_s = int(duration_s)
    for size_s, name, rest_s, rest_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole_s >= size_s:
            return f"{whole_s // size_s} {name} {whole_s % size_s // rest_s} {rest_name}"
    return f"{whole_s} s"


def duration(value_s: float | None) -> str:
    """Format a measured time: 0.0123 -> '12.3 ms', None -> '-'."""
    if value_s is None:
        return "-"
    if abs(value_s) < 1:
        return f"{value_s * 1e3:.1f} ms" if abs(value_s) >= 1e-4 else f"{value_s * 1e6:.0f} us"
    return f"{value_s:.2f} s"


def share(fraction: float | None) -> str:
    """Format a fraction: 0.123 -> '12.3%', None -> '-'."""
    return "-" if fraction is None else f"{fraction:.1%}"


def parse_duration(text: str) -> float:
    """Parse a duration into seconds: '90', '90s', '10m', '10min', '2h'.

    Raises:
        ValueError: the text is not a positive duration.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)?\s*", text)
    if found is None or float(found[1]) <= 0.0:
        raise ValueError(f"must be a time such as 90s, 10m or 2h, got {text!r}")
    return float(found[1]) * {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600}[found[2]]


def layer_ranges(layers: Sequence[int]) -> str:
    """Format ascending layers as ranges, both ends included: (0, 1, 2, 5) -> '0-2,5'."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
