"""How figures look: fonts, and a colour, a line and a mark for each policy.

The colours are Okabe and Ito's, told apart by colour-blind readers too; lines and marks differ as well, for print.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ballast.common.extras import lacking

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#666666"
MIB = 1 << 20

RC: dict[Any, Any] = {  # Any: as matplotlib declares its settings
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "ballast",  # the same figure gives the same file
}


@dataclass(frozen=True, slots=True)
class Style:
    colour: str
    line: Any  # Any: a name or a dash pattern, as matplotlib takes it
    mark: str


_OF_POLICY = {
    "drop": Style(BLUE, "-", "o"),
    "recompute": Style(VERMILION, "--", "s"),
    "swap": Style(GREEN, "-.", "^"),
    "migrate": Style(PURPLE, ":", "D"),
    "static-pipeline": Style(ORANGE, (0, (5, 1, 1, 1)), "v"),
}
_OTHERS = (
    Style(SKY, (0, (3, 1)), "P"),
    Style(BLACK, (0, (1, 1)), "X"),
    Style("#8C6D1F", (0, (6, 2)), "<"),
    Style(GREY, (0, (4, 1, 1, 1, 1, 1)), ">"),
    Style("#7A3E9D", (0, (2, 2)), "h"),
)


def styles(labels: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """(label, overload policy) -> the policy's own style for its first label, another one for each further label."""
    found: dict[str, Style] = {}
    taken: set[str] = set()
    others = 0
    for label, policy in labels:
        if label in found:
            continue
        if policy in _OF_POLICY and policy not in taken:
            taken.add(policy)
            found[label] = _OF_POLICY[policy]
        else:
            found[label] = _OTHERS[others % len(_OTHERS)]
            others += 1
    return found


def require_matplotlib(what: str) -> None:
    """Raises ConfigError, naming what (a flag) needs it, if it is not installed."""
    if find_spec("matplotlib") is None:
        raise lacking(what, "matplotlib", "bench")
