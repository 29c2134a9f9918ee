"""The version of what workers say to each other."""

# Of stage messages, frames on links and the layout of KV: two workers can share a group or move KV only with equal
# numbers. Raise it with each change of one of these; `tests/unit/repository/test_protocol.py` sees them.
PROTOCOL = 11
# A dispatcher of one number serves workers of the number before and of the next one, so that either may be upgraded
# first.
_DISPATCHER_REACH = 1


def may_be_dispatched_to(worker_protocol: int) -> bool:
    """Whether a dispatcher of this version can use a worker that speaks `worker_protocol`."""
    return abs(worker_protocol - PROTOCOL) <= _DISPATCHER_REACH
