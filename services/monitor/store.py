"""The monitor's keys in the state server. All under `ballast:`

registry:<worker id>   hash, one per instance; expires unless renewed. Read by status tools and the next active monitor;
                       not used for decisions while a monitor is active
layout                 read here, written by the planner (services.planner.store)
backlogs               hash dispatcher id -> "<serial> <numbers of ballast.common.traffic>", written by the dispatchers
                       (services.dispatcher.store); entries of dispatchers that died are deleted here
"""

import base64
import binascii
import contextlib
from collections.abc import Awaitable
from typing import Any, cast

from google.protobuf.message import DecodeError
from pydantic import TypeAdapter, ValidationError
from redis.typing import EncodableT, FieldT

from ballast.common.errors import BallastError, InvalidRequest
from ballast.common.ids import DispatcherId, Incarnation, WorkerId
from ballast.common.instance import Instance
from ballast.common.layout import Layout
from ballast.common.load import LoadReport
from ballast.common.model import ModelInfo
from ballast.common.traffic import read_traffic
from ballast.rpc import border
from ballast.rpc.codec import LAYOUT
from ballast.service.logs import get_logger
from ballast.service.state import KEY_PREFIX, StateServer, candidates_key, is_garbage, unless_garbage
from ballastpb.cluster.v1 import cluster_pb2
from services.monitor.core.messages import BacklogWord, WholeMemory
from services.monitor.shell import InstanceRow

_LAYOUT = f"{KEY_PREFIX}layout"
_BACKLOGS = f"{KEY_PREFIX}backlogs"
_ROW_PREFIX = f"{KEY_PREFIX}registry:"
_SCAN_COUNT = 500
_MOST_MONITORS = 16
_ROWS_AT_ONCE = 100  # rows per round trip, which bounds the buffers on both sides

_MODEL = TypeAdapter(ModelInfo)
_LOAD = TypeAdapter(LoadReport)
_WHOLE = TypeAdapter(WholeMemory)


class RedisRegistry:
    def __init__(self, state: StateServer, *, ttl_s: float) -> None:
        self._state = state
        self._ttl_ms = int(ttl_s * 1000)

    async def write(self, rows: list[InstanceRow], forget: set[WorkerId]) -> None:
        for first in range(0, max(len(rows), 1), _ROWS_AT_ONCE):
            pipe = self._state.redis.pipeline(transaction=False)
            for row in rows[first : first + _ROWS_AT_ONCE]:
                key = _ROW_PREFIX + row.instance.worker_id
                pipe.hset(key, mapping=_to_fields(row))
                pipe.pexpire(key, self._ttl_ms)
            if first == 0 and forget:
                pipe.delete(*(_ROW_PREFIX + worker_id for worker_id in sorted(forget)))
            if len(pipe):
                replies = await self._state.run(cast(Awaitable[list[Any]], pipe.execute(raise_on_error=False)))
                if any(map(is_garbage, replies)):  # replaced with the next write
                    keys = [_ROW_PREFIX + row.instance.worker_id for row in rows[first : first + _ROWS_AT_ONCE]]
                    await self._state.run(self._state.redis.delete(*keys))

    async def read(self) -> list[InstanceRow]:
        """Read all rows, sorted by worker id. Unreadable rows are left out and logged."""
        redis = self._state.redis
        keys: list[str] = []
        cursor = 0
        while True:
            # Any: redis-py types the reply of SCAN in part only.
            scan = cast(Any, redis).scan(cursor, match=_ROW_PREFIX + "*", count=_SCAN_COUNT)
            cursor, found = await self._state.run(scan)
            keys += found
            if cursor == 0:
                break
        keys = sorted(set(keys))
        rows: list[InstanceRow | None] = []
        for first in range(0, len(keys), _ROWS_AT_ONCE):
            some = keys[first : first + _ROWS_AT_ONCE]
            pipe = redis.pipeline(transaction=False)
            for key in some:
                pipe.hgetall(key)
            replies = await self._state.run(cast(Awaitable[list[Any]], pipe.execute(raise_on_error=False)))
            rows += [_from_fields(key, unless_garbage(reply, {})) for key, reply in zip(some, replies, strict=True)]
        return [row for row in rows if row is not None]


def _to_fields(row: InstanceRow) -> dict[FieldT, EncodableT]:
    fields: dict[FieldT, EncodableT] = {
        "incarnation": str(row.instance.incarnation),
        "address": row.instance.address,
        "model": _MODEL.dump_json(row.instance.model).decode(),
        "data_address": row.instance.data_address,
        "draining": str(int(row.draining)),
        "report_age_s": f"{row.report_age_s:.3f}",
    }
    if row.load is not None:
        fields["load"] = _LOAD.dump_json(row.load).decode()
    if row.whole is not None:
        fields["whole"] = _WHOLE.dump_json(row.whole).decode()
    return fields


def _from_fields(key: str, fields: dict[str, str]) -> InstanceRow | None:
    if not fields:  # expired between two commands
        return None
    try:
        instance = Instance(
            worker_id=WorkerId(key.removeprefix(_ROW_PREFIX)),
            incarnation=Incarnation(int(fields["incarnation"])),
            address=fields["address"],
            model=_MODEL.validate_json(fields["model"]),
            data_address=fields.get("data_address", ""),
        )
        load = _LOAD.validate_json(fields["load"]) if "load" in fields else None
        whole = _WHOLE.validate_json(fields["whole"]) if "whole" in fields else None
        return InstanceRow(instance, fields["draining"] == "1", load, float(fields["report_age_s"]), whole)
    except (KeyError, ValueError, ValidationError) as error:
        get_logger().warning("registry row of another version left out", key=key, why=str(error))
        return None


class RedisSurroundings:
    """Entries of the planner and dispatchers in the state server."""

    def __init__(self, state: StateServer) -> None:
        self._state = state
        self._body: str | None = None  # serialised form of `_layout`
        self._layout: Layout | None = None
        self.monitor_addresses: tuple[str, ...] = ()  # addresses of all running monitors, as last read

    async def read(self) -> tuple[Layout | None, tuple[BacklogWord, ...]]:
        pipe = self._state.redis.pipeline(transaction=False)
        pipe.get(_LAYOUT)
        pipe.hgetall(_BACKLOGS)
        cast(Any, pipe).zrange(candidates_key("monitor"), 0, -1)  # Any: redis-py types it in part only
        replies = await self._state.run(cast(Awaitable[list[Any]], pipe.execute(raise_on_error=False)))
        if is_garbage(replies[1]):  # not a hash, so dispatchers could not write their entries
            await self._state.run(self._state.redis.delete(_BACKLOGS))
        body = cast(str | None, unless_garbage(replies[0], None))
        backlogs = cast(dict[str, str], unless_garbage(replies[1], {}))
        self.monitor_addresses = _addresses_of(unless_garbage(replies[2], []))
        if body != self._body:  # decoded once per change
            self._body, self._layout = body, _layout_from(body)
        words = [_parse_backlog(*item) for item in sorted(backlogs.items())]
        return self._layout, tuple(word for word in words if word is not None)

    async def forget(self, dispatcher_ids: tuple[DispatcherId, ...]) -> None:
        await self._state.run(self._state.redis.hdel(_BACKLOGS, *dispatcher_ids))


def _addresses_of(given: list[str]) -> tuple[str, ...]:
    found: list[str] = []
    for address in given[:_MOST_MONITORS]:
        with contextlib.suppress(InvalidRequest):
            found.append(border.address("monitor", address))
    return tuple(found)


def _layout_from(body: str | None) -> Layout | None:
    if body is None:
        return None
    try:
        layout = LAYOUT.record(cluster_pb2.Layout.FromString(base64.b64decode(body, validate=True)))
        layout.check()
    except (binascii.Error, ValueError, DecodeError, BallastError) as error:
        get_logger().error("layout in the state server cannot be used", why=str(error))
        return None
    return layout


def _parse_backlog(dispatcher_id: str, text: str) -> BacklogWord | None:
    try:
        serial, numbers = text.split(" ", 1)
        return BacklogWord(DispatcherId(dispatcher_id), serial, read_traffic(numbers))
    except ValueError:
        get_logger().warning("backlog of another version left out", dispatcher=dispatcher_id, word=text[:100])
        return None
