"""The registry in the state server: one hash per instance, gone when it is not renewed. Owner of `ballast:registry:*`.

It is for status tools and for the next active monitor; nothing is decided by it while a monitor is active.
"""

from collections.abc import Awaitable
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from redis.typing import EncodableT, FieldT

from ballast.common.ids import Incarnation, WorkerId
from ballast.common.load import LoadReport
from ballast.common.model import ModelInfo
from ballast.service.logs import get_logger
from ballast.service.state import KEY_PREFIX, StateServer
from services.monitor.core.messages import Instance
from services.monitor.shell import Row

_ROW_PREFIX = f"{KEY_PREFIX}registry:"
_SCAN_COUNT = 500
_ROWS_AT_ONCE = 100  # rows per round trip: bounds the buffers on both sides

_MODEL = TypeAdapter(ModelInfo)
_LOAD = TypeAdapter(LoadReport)


class RedisRegistry:
    def __init__(self, state: StateServer, *, ttl_s: float) -> None:
        self._state = state
        self._ttl_ms = int(ttl_s * 1000)

    async def write(self, rows: list[Row], forget: set[WorkerId]) -> None:
        for first in range(0, max(len(rows), 1), _ROWS_AT_ONCE):
            pipe = self._state.redis.pipeline(transaction=False)
            for row in rows[first : first + _ROWS_AT_ONCE]:
                key = _ROW_PREFIX + row.instance.worker_id
                pipe.hset(key, mapping=_to_fields(row))
                pipe.pexpire(key, self._ttl_ms)
            if first == 0 and forget:
                pipe.delete(*(_ROW_PREFIX + worker_id for worker_id in sorted(forget)))
            if len(pipe):
                await self._state.run(pipe.execute())

    async def read(self) -> list[Row]:
        """All rows, by worker id; those that this version cannot read are left out and named in the log."""
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
        rows: list[Row | None] = []
        for first in range(0, len(keys), _ROWS_AT_ONCE):
            some = keys[first : first + _ROWS_AT_ONCE]
            pipe = redis.pipeline(transaction=False)
            for key in some:
                pipe.hgetall(key)
            reading = cast(Awaitable[list[dict[str, str]]], pipe.execute())
            rows += [_from_fields(*pair) for pair in zip(some, await self._state.run(reading), strict=True)]
        return [row for row in rows if row is not None]


def _to_fields(row: Row) -> dict[FieldT, EncodableT]:
    fields: dict[FieldT, EncodableT] = {
        "incarnation": str(row.instance.incarnation),
        "address": row.instance.address,
        "model": _MODEL.dump_json(row.instance.model).decode(),
        "draining": str(int(row.draining)),
        "report_age_s": f"{row.report_age_s:.3f}",
    }
    if row.load is not None:
        fields["load"] = _LOAD.dump_json(row.load).decode()
    return fields


def _from_fields(key: str, fields: dict[str, str]) -> Row | None:
    if not fields:  # ran out between two commands
        return None
    try:
        instance = Instance(
            worker_id=WorkerId(key.removeprefix(_ROW_PREFIX)),
            incarnation=Incarnation(int(fields["incarnation"])),
            address=fields["address"],
            model=_MODEL.validate_json(fields["model"]),
        )
        load = _LOAD.validate_json(fields["load"]) if "load" in fields else None
        return Row(instance, fields["draining"] == "1", load, float(fields["report_age_s"]))
    except (KeyError, ValueError, ValidationError) as error:
        get_logger().warning("registry row of another version left out", key=key, why=str(error))
        return None
