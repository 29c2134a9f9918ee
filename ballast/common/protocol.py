"""The version of the protocol between workers."""

# Version of stage messages, frames on links and the layout of KV: two workers can share a group or move KV only if
# theirs are equal. Raise it with each change of these; `tests/unit/repository/test_protocol.py` detects changes.
PROTOCOL = 12
# A dispatcher also uses workers whose version is one lower or higher, so that either may be upgraded first.
_DISPATCHER_REACH = 1


def may_be_dispatched_to(worker_protocol: int) -> bool:
    """Whether a dispatcher of this version can use a worker of version `worker_protocol`."""
    return abs(worker_protocol - PROTOCOL) <= _DISPATCHER_REACH
