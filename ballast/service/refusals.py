"""Counts invalid messages by sender, and logs the first for each sender and field. The service continues."""

from prometheus_client import Counter

from ballast.common.errors import InvalidRequest
from ballast.service.logs import get_logger
from ballast.service.metrics import REGISTRY

_REFUSED = Counter(
    "ballast_messages_refused_total",
    "Refused invalid messages of other services, by sender",
    ["sender"],
    registry=REGISTRY,
)
_MAX_SENDERS = 256  # limit on distinct senders, which bounds memory; further ones are counted together
_OTHERS = "others"


class Refusals:
    """The messages that one service has refused. Not thread-safe."""

    def __init__(self) -> None:
        self._fields: dict[str, set[str]] = {}

    def note(self, sender: str, error: InvalidRequest) -> None:
        if sender not in self._fields and len(self._fields) >= _MAX_SENDERS:
            sender = _OTHERS
        _REFUSED.labels(sender).inc()
        fields = self._fields.setdefault(sender, set())
        if error.field not in fields:
            fields.add(error.field)
            get_logger().warning("message refused", sender=sender, field=error.field, why=error.why[:500])
