"""Latency targets (service level objectives), per priority class and per request."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ballast.common.sampling import PriorityClass

# HTTP headers and gRPC metadata keys of a request's targets, in the order of the fields of `Targets`.
TARGET_HEADERS = ("x-ballast-ttft-target-s", "x-ballast-tpot-target-s")
_ONLINE = [each for each in PriorityClass if not each.offline]


class Targets(NamedTuple):
    """Latency targets in seconds; inf: no target."""

    ttft_s: float = math.inf  # time to first token (TTFT)
    tpot_s: float = math.inf  # mean time per output token after the first (TPOT)

    def or_else(self, other: "Targets") -> "Targets":
        """These targets; missing ones are taken from `other`."""
        return Targets(
            other.ttft_s if math.isinf(self.ttft_s) else self.ttft_s,
            other.tpot_s if math.isinf(self.tpot_s) else self.tpot_s,
        )


NO_TARGETS = Targets()


def for_all(ttft_s: float | None = None, tpot_s: float | None = None) -> Mapping[PriorityClass, Targets]:
    """The same targets for every online class; None: no target."""
    targets = Targets(math.inf if ttft_s is None else ttft_s, math.inf if tpot_s is None else tpot_s)
    return dict.fromkeys(_ONLINE, targets)


def read_by_class(text: str | None) -> Mapping[PriorityClass, float]:
    """Parse a target in seconds per online class: `0.05` (all classes), `interactive=0.03,default=0.1`, or the name of
    a JSON file with an object of classes and seconds. None: no targets.

    Raises:
        ValueError: the text has none of these forms, or the file cannot be read; the message says why.
    """
    if text is None:
        return {}
    if text.endswith(".json"):
        try:
            found: object = json.loads(Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{text} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{text} must contain an object that maps classes to seconds")
        pairs = [(str(name), str(value)) for name, value in found.items()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    elif "=" in text:
        pairs = [(name, value) for name, _, value in (part.partition("=") for part in text.split(","))]
    else:
        pairs = [(each.value, text) for each in _ONLINE]
    known = {each.value: each for each in _ONLINE}
    targets: dict[PriorityClass, float] = {}
    for name, value in pairs:
        if name.strip() not in known:
            raise ValueError(f"{name.strip()!r} is no online class, these are {', '.join(known)}")
        targets[known[name.strip()]] = seconds_of(value)
    return targets


def seconds_of(text: str) -> float:
    """Parse seconds. Raises ValueError if the text is not a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0.0:
        raise ValueError(f"{text.strip()!r} is no positive number of seconds")
    return seconds
