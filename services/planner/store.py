"""The layout in the state server. Owner of these keys, which change together:

ballast:layout           string, base64 of ballastpb.cluster.v1.Layout; dispatchers read it
ballast:layout:meta      hash {epoch, token (fencing token of who wrote it), model (JSON)}; for planners
ballast:layout:changed   channel; carries the new epoch
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
META_KEY = f"{KEY_PREFIX}layout:meta"
LAYOUT_CHANNEL = f"{KEY_PREFIX}layout:changed"

_MODEL = TypeAdapter(ModelInfo | None)

# KEYS: layout, meta, lease. ARGV: expected epoch ("" for none), token, new epoch, body, model, channel.
_WRITE = """
if redis.call('HGET', KEYS[3], 'token') ~= ARGV[2] then return 'FENCED' end
if (redis.call('HGET', KEYS[2], 'epoch') or '') ~= ARGV[1] then return 'CONFLICT' end
redis.call('SET', KEYS[1], ARGV[4])
redis.call('HSET', KEYS[2], 'epoch', ARGV[3], 'token', ARGV[2], 'model', ARGV[5])
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
        pipe = self._state.redis.pipeline(transaction=True)
        pipe.get(LAYOUT_KEY)
        pipe.hgetall(META_KEY)
        # Any: a list of replies.
        body, meta = cast(
            tuple[str | None, dict[str, str]], await self._state.run(cast(Awaitable[Any], pipe.execute()))
        )
        if "epoch" not in meta:
            return None
        try:
            layout = codec.layout_from_proto(pb.Layout.FromString(base64.b64decode(body or "", validate=True)))
            layout.check()
            if layout.epoch != int(meta["epoch"]):
                raise ValueError(f"epoch {layout.epoch} beside {meta['epoch']}")
            return StoredLayout(layout, _MODEL.validate_json(meta["model"]))
        except (KeyError, ValueError, binascii.Error, DecodeError, ValidationError, InvariantViolation) as error:
            get_logger().error("stored layout cannot be read, it will be planned anew", why=str(error))
            return StoredLayout(Layout(Epoch(int(meta["epoch"])), 0, (), "unreadable"), None)

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
        script = cast(Awaitable[Any], self._write(keys=[LAYOUT_KEY, META_KEY, lease_key("planner")], args=args))
        try:
            return WriteOutcome[str(await self._state.run(script))]
        except Unavailable as error:
            get_logger().warning("layout not written", epoch=command.layout.epoch, why=error.why)
            return WriteOutcome.UNAVAILABLE
