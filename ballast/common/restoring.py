"""How much room a group has while its members become whole instances again.

Each member then holds the KV of its own layers for all sequences of the group, and that of all other layers for those
that it is going to lead. Its own layers get many blocks, the others a part of that.
"""

from fractions import Fraction

_SHARE_SLACK = Fraction(6, 5)  # sequences differ in size, so shares do


def narrow_part(member_count: int) -> Fraction:
    """Of the blocks of a member's own layers, how many its other layers need for its share of the sequences."""
    return min(Fraction(1), _SHARE_SLACK / member_count)


def room_while_copying(member_count: int) -> float:
    """Blocks that such a group may hold, in parts of what a member has with all layers; more than that for a group of
    several, less than all its members have together. With layers in equal parts.
    """
    own = Fraction(1, member_count)
    return float(1 / (own + (1 - own) * narrow_part(member_count)))
