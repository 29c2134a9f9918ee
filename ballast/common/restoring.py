"""How much room a group has while its members become whole instances again.

Each member then holds the KV of its own layers for all sequences of the group, and that of all other layers for those
that it is going to lead. Its own layers get many blocks, the others a part of that.
"""

from fractions import Fraction

_SHARE_SLACK = Fraction(6, 5)  # sequences differ in size, so shares do


def _narrow_part(member_count: int) -> Fraction:
    """Share of the blocks of a member's own layers that its other layers need for its share of the sequences."""
    return min(Fraction(1), _SHARE_SLACK / member_count)


def divided_extents(home_extents: int, layer_count: int, own_count: int, member_count: int) -> tuple[int, int]:
    """Extents of each of a member's own layers, and of each other one, while KV is copied. `home_extents`: of each
    layer when all have the same number, as with one member.
    """
    everything, other_count, part = home_extents * layer_count, layer_count - own_count, _narrow_part(member_count)
    if not other_count:
        return home_extents, home_extents
    wide = int(everything / (own_count + other_count * part))
    while (narrow := (everything - wide * own_count) // other_count) < wide * part:  # rounding took too much of it
        wide -= 1
    return wide, narrow


def room_while_copying(member_count: int) -> float:
    """Blocks that such a group may hold, in parts of what a member has with all layers; more than that for a group of
    several, less than all its members have together. With layers in equal parts.
    """
    own = Fraction(1, member_count)
    return float(1 / (own + (1 - own) * _narrow_part(member_count)))
