"""Text that describes the difference between two layouts (pure)."""

from collections.abc import Mapping

from ballast.common.ids import WorkerId
from ballast.common.layout import Group, Member, Standing

_MOST_NAMES = 8


def explain(before: tuple[Group, ...], after: tuple[Group, ...], why_lost: Mapping[WorkerId, str]) -> str:
    """Describe how the groups of two layouts differ, for example "join: w1 w2; lost: w3 (silent for 3.1 s)"."""
    old, new = _members(before), _members(after)
    lost = [f"{w} ({why_lost[w]})" if w in why_lost else w for w in sorted(set(old) - set(new))]
    both = sorted(set(old) & set(new))
    parts = {
        "join": sorted(set(new) - set(old)),
        "restart": [w for w in both if new[w].incarnation != old[w].incarnation],
        "drain": [
            w for w in both if new[w].draining and not old[w].draining and new[w].incarnation == old[w].incarnation
        ],
        **{
            standing: [w for w in both if new[w].standing is standing and old[w].standing is not standing]
            for standing in Standing
        },
        "lost": lost,
        "address": [w for w in both if new[w].address != old[w].address and new[w].incarnation == old[w].incarnation],
    }
    return "; ".join(f"{what}: {_names(who)}" for what, who in parts.items() if who) or "written again"


def _members(groups: tuple[Group, ...]) -> dict[WorkerId, Member]:
    return {member.worker_id: member for group in groups for member in group.members}


def _names(names: list[str] | list[WorkerId]) -> str:
    more = len(names) - _MOST_NAMES
    return " ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
