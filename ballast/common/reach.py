"""The longest context that a cluster can hold, published by the planner for dispatchers in the state server."""

from dataclasses import astuple, dataclass

from ballast.common.errors import InvariantViolation

_MOST = 1 << 40
MARGIN = 1.05  # spare factor on the KV that a group for a long request needs for it and for running requests


@dataclass(frozen=True, slots=True)
class Reach:
    """Maximum context lengths in tokens, prompt and answer together, up to `max_model_len`."""

    alone_tokens: int  # in the largest instance on its own
    group_tokens: int  # in the largest group that the instances could form
    group_size: int  # instances of the smallest group with that capacity
    instance_count: int  # number of instances

    def check(self) -> None:
        """Raise InvariantViolation if a group would hold less than one instance."""
        if not 0 <= self.alone_tokens <= self.group_tokens or not 1 <= self.group_size <= self.instance_count:
            raise InvariantViolation(f"no reach: {self}")

    def told(self) -> str:
        """Text for people."""
        alone = f"up to {self.alone_tokens:,} tokens here alone"
        if self.group_tokens == self.alone_tokens:
            return alone
        return f"{alone}, {self.group_tokens:,} with {self.group_size} of {self.instance_count} members"


def write_reach(reach: Reach) -> str:
    """Serialise for the state server: all fields as numbers, in order."""
    return " ".join(map(str, astuple(reach)))


def read_reach(text: str) -> Reach:
    """Parse the form of `write_reach`.

    Raises:
        ValueError: the value has another form; another version may have written it.
    """
    alone, group, size, there = (int(word) for word in text.split(" ") if word.isascii() and word.isdigit())
    reach = Reach(alone, group, size, there)
    try:
        reach.check()
    except InvariantViolation as error:
        raise ValueError(error.why) from error
    if group > _MOST:
        raise ValueError(f"more tokens than there can be: {text}")
    return reach
