"""The layout in the state server. Owner of `ballast:layout` and of the channel `ballast:layout:changed`.

`ballast:layout` is a hash: `epoch`, `token` (fencing token of who wrote it), `body` (ballastpb.cluster.v1.Layout,
base64) and `model` (JSON). The channel carries the new epoch.
"""

import base64
import binascii
from collections.abc import Awaitable
from typing import Any, cast

from google.protobuf.message import DecodeError
from pydantic import TypeAdapter, ValidationError

from ballast.common.errors import InvariantViolation, Unavailable
from ballast.common.ids import Epoch
from ballast.common.layout import Layout
from ballast.common.model import ModelInfo
from ballast.rpc import codec
from ballast.service.logs import get_logger
from ballast.service.state import KEY_PREFIX, StateServer, lease_key
from ballastpb.cluster.v1 import cluster_pb2 as pb
from services.planner.core.messages import StoredLayout, WriteLayout, WriteOutcome

LAYOUT_KEY = f"{KEY_PREFIX}layout"
LAYOUT_CHANNEL = f"{KEY_PREFIX}layout:changed"

_MODEL = TypeAdapter(ModelInfo | None)

# KEYS: layout, lease. ARGV: expected epoch ("" for none), token, new epoch, body, model, channel.
_WRITE = """
if redis.call('HGET', KEYS[2], 'token') ~= ARGV[2] then return 'FENCED' end
if (redis.call('HGET', KEYS[1], 'epoch') or '') ~= ARGV[1] then return 'CONFLICT' end
redis.call('HSET', KEYS[1], 'epoch', ARGV[3], 'token', ARGV[2], 'body', ARGV[4], 'model', ARGV[5])
redis.call('PUBLISH', ARGV[6], ARGV[3])
return 'WRITTEN'
"""


class RedisLayoutStore:
    def __init__(self, state: StateServer) -> None:
        self._state = state
        self._write = state.redis.register_script(_WRITE)

    async def load(self) -> StoredLayout | None:
        """
        Raises:
            Unavailable: no answer.
        """
        fields = await self._state.run(cast(Awaitable[dict[str, str]], self._state.redis.hgetall(LAYOUT_KEY)))
        if "epoch" not in fields:
            return None
        try:
            layout = codec.layout_from_proto(pb.Layout.FromString(base64.b64decode(fields["body"], validate=True)))
            layout.check()
            return StoredLayout(layout, _MODEL.validate_json(fields["model"]))
        except (KeyError, binascii.Error, DecodeError, ValidationError, InvariantViolation) as error:
            get_logger().error("stored layout cannot be read, it will be planned anew", why=str(error))
            return StoredLayout(Layout(Epoch(int(fields["epoch"])), 0, (), "unreadable"), None)

    async def write(self, command: WriteLayout) -> WriteOutcome:
        args = [
            "" if command.expected_epoch is None else str(command.expected_epoch),
            str(command.token),
            str(command.layout.epoch),
            base64.b64encode(codec.layout_to_proto(command.layout).SerializeToString(deterministic=True)).decode(),
            _MODEL.dump_json(command.model).decode(),
            LAYOUT_CHANNEL,
        ]
        # Any: a script's result has no type.
        script = cast(Awaitable[Any], self._write(keys=[LAYOUT_KEY, lease_key("planner")], args=args))
        try:
            return WriteOutcome[str(await self._state.run(script))]
        except Unavailable as error:
            get_logger().warning("layout not written", epoch=command.layout.epoch, why=error.why)
            return WriteOutcome.UNAVAILABLE
