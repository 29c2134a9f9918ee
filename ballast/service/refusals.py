"""Invalid messages: counted by sender, logged once for each sender and field. The service continues."""

from prometheus_client import Counter

from ballast.common.errors import InvalidRequest
from ballast.service.logs import get_logger
from ballast.service.metrics import REGISTRY

_REFUSED = Counter(
    "ballast_messages_refused_total",
    "Messages of other services that made no sense, by sender",
    ["sender"],
    registry=REGISTRY,
)
_MAX_SENDERS = 256  # distinct senders; further ones are counted together, which bounds memory
_OTHERS = "others"


class Refusals:
    """Messages refused by one service. Not thread-safe."""

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
