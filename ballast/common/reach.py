"""The longest context that a cluster can hold; the planner publishes it for dispatchers in the state server."""

from dataclasses import astuple, dataclass

from ballast.common.errors import InvariantViolation

_MOST = 1 << 40
MARGIN = 1.05  # a group for a long request has this multiple of the KV that the long and the running requests need


@dataclass(frozen=True, slots=True)
class Reach:
    """Maximum context lengths in tokens, prompt and answer together, up to `max_model_len`."""

    alone_tokens: int  # longest context of the largest instance that serves alone
    group_tokens: int  # longest context of the largest group that the instances could form
    group_size: int  # instances in the smallest group that reaches `group_tokens`
    instance_count: int  # number of instances

    def check(self) -> None:
        """Raise InvariantViolation if `group_tokens` is less than `alone_tokens`, or `group_size` is out of range."""
        if not 0 <= self.alone_tokens <= self.group_tokens or not 1 <= self.group_size <= self.instance_count:
            raise InvariantViolation(f"impossible reach: {self}")

    def told(self) -> str:
        """The lengths as human-readable text."""
        alone = f"up to {self.alone_tokens:,} tokens here alone"
        if self.group_tokens == self.alone_tokens:
            return alone
        return f"{alone}, {self.group_tokens:,} with {self.group_size} of {self.instance_count} members"


def write_reach(reach: Reach) -> str:
    """Serialise for the state server: all fields as numbers, in order."""
    return " ".join(map(str, astuple(reach)))


def read_reach(text: str) -> Reach:
    """Parse the output of `write_reach`.

    Raises:
        ValueError: the text has another form, perhaps written by another version.
    """
    alone, group, size, there = (int(word) for word in text.split(" ") if word.isascii() and word.isdigit())
    reach = Reach(alone, group, size, there)
    try:
        reach.check()
    except InvariantViolation as error:
        raise ValueError(error.why) from error
    if group > _MOST:
        raise ValueError(f"impossible token counts: {text}")
    return reach
