"""Style of figures: fonts, and a colour, a line style and a marker for each policy.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish; lines and markers differ, too, for
print without colours.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ballast.common.extras import lacking

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#666666"
MIB = 1 << 20

RC: dict[Any, Any] = {  # Any: matplotlib's own type of settings
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "ballast",  # makes the output reproducible
}


@dataclass(frozen=True, slots=True)
class Style:
    colour: str
    line: Any  # Any: matplotlib takes names and dash patterns
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
    """The style of each label. `labels`: (label, overload policy); a policy's first label gets the policy's style,
    further labels get other styles.
    """
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
    """Raise ConfigError if matplotlib is not installed; the message names `what` (a flag) as needing it."""
    if find_spec("matplotlib") is None:
        raise lacking(what, "matplotlib", "bench")
