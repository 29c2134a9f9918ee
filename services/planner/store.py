"""The layout in the state server. Owner of these keys, which change together:

ballast:layout           string, base64 of ballastpb.cluster.v1.Layout; dispatchers read it
ballast:layout:meta      hash {epoch, token (the writer's fencing token), model (JSON), partial (JSON)}; for planners
ballast:reach            string of ballast.common.reach: the longest context the cluster could hold; dispatchers read it
ballast:learnt           string, JSON of services.planner.policy.reserve.Learnt; for planners
ballast:layout:changed   channel; carries the new epoch
ballast:transition       hash {epoch, stage, token, body (JSON)}: the journal of the newest transition
"""

import base64
import binascii
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.message import DecodeError
from pydantic import TypeAdapter, ValidationError

from ballast.common.errors import BallastError, Unavailable
from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout
from ballast.common.model import ModelInfo
from ballast.common.reach import Reach, write_reach
from ballast.common.transition import TransitionKind
from ballast.rpc import border, codec
from ballast.service.logs import get_logger
from ballast.service.state import HEAL, KEY_PREFIX, StateServer, lease_key, unless_garbage
from ballastpb.cluster.v1 import cluster_pb2 as pb
from services.planner.core.messages import StoredLayout, WriteJournal, WriteLayout, WriteOutcome
from services.planner.core.stages import Stage
from services.planner.core.transition import Journal
from services.planner.policy.replicate import Partial
from services.planner.policy.reserve import Learnt

LAYOUT_KEY = f"{KEY_PREFIX}layout"
META_KEY = f"{KEY_PREFIX}layout:meta"
REACH_KEY = f"{KEY_PREFIX}reach"
LEARNT_KEY = f"{KEY_PREFIX}learnt"
LAYOUT_CHANNEL = f"{KEY_PREFIX}layout:changed"
JOURNAL_KEY = f"{KEY_PREFIX}transition"

_MODEL = TypeAdapter(ModelInfo | None)
_LEARNT = TypeAdapter(Learnt)
_PARTIAL = TypeAdapter(tuple[tuple[str, int], ...])


@dataclass(frozen=True, slots=True)
class _JournalBody:
    kind: TransitionKind
    base: str  # base64 of ballastpb.cluster.v1.Layout
    target: str
    why: str
    failure: str


_JOURNAL = TypeAdapter(_JournalBody)

# An invalid number counts as absent, because otherwise it could never be overwritten.
_NUMBER = """
local function number(key, field) return string.match(redis.call('HGET', key, field) or '', '^%d+$') or '' end
"""

# KEYS: layout, meta, lease. ARGV: expected epoch ("" for none), token, new epoch, body, model, channel, partial.
_WRITE = (
    _NUMBER
    + HEAL
    + """
heal(KEYS[1], 'string')
heal(KEYS[2], 'hash')
if redis.call('HGET', KEYS[3], 'token') ~= ARGV[2] then return 'FENCED' end
if number(KEYS[2], 'epoch') ~= ARGV[1] then return 'CONFLICT' end
redis.call('SET', KEYS[1], ARGV[4])
redis.call('HSET', KEYS[2], 'epoch', ARGV[3], 'token', ARGV[2], 'model', ARGV[5], 'partial', ARGV[7])
redis.call('PUBLISH', ARGV[6], ARGV[3])
return 'WRITTEN'
"""
)

# KEYS: reach or learnt, lease. ARGV: token, value, channel ("": none).
_WRITE_VALUE = """
if redis.call('HGET', KEYS[2], 'token') ~= ARGV[1] then return 'FENCED' end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[3] ~= '' then redis.call('PUBLISH', ARGV[3], 'reach') end
return 'WRITTEN'
"""

# KEYS: layout, meta, lease, journal. ARGV: expected epoch ("-": any), token, epoch of the transition, layout body
# ("": the layout stays), model, channel, partial, stage, journal body.
_WRITE_JOURNAL = (
    _NUMBER
    + HEAL
    + """
heal(KEYS[1], 'string')
heal(KEYS[2], 'hash')
heal(KEYS[4], 'hash')
if redis.call('HGET', KEYS[3], 'token') ~= ARGV[2] then return 'FENCED' end
local old = redis.call('HMGET', KEYS[4], 'epoch', 'stage', 'body')
if old[1] == ARGV[3] and old[2] == ARGV[8] and old[3] == ARGV[9] then return 'WRITTEN' end
if (tonumber(old[1] or '0') or 0) > tonumber(ARGV[3]) then return 'CONFLICT' end
if ARGV[1] ~= '-' and number(KEYS[2], 'epoch') ~= ARGV[1] then return 'CONFLICT' end
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[1], ARGV[4])
  redis.call('HSET', KEYS[2], 'epoch', ARGV[3], 'token', ARGV[2], 'model', ARGV[5], 'partial', ARGV[7])
  redis.call('PUBLISH', ARGV[6], ARGV[3])
end
redis.call('HSET', KEYS[4], 'epoch', ARGV[3], 'stage', ARGV[8], 'token', ARGV[2], 'body', ARGV[9])
return 'WRITTEN'
"""
)


class RedisLayoutStore:
    def __init__(self, state: StateServer) -> None:
        self._state = state
        self._write = state.redis.register_script(_WRITE)
        self._write_journal = state.redis.register_script(_WRITE_JOURNAL)
        self._write_value = state.redis.register_script(_WRITE_VALUE)

    async def load(self) -> StoredLayout | None:
        """Read the stored layout and journal; None if nothing is stored.

        Raises:
            Unavailable: no answer.
        """
        pipe = self._state.redis.pipeline(transaction=True)
        pipe.get(LAYOUT_KEY)
        pipe.hgetall(META_KEY)
        pipe.hgetall(JOURNAL_KEY)
        pipe.get(LEARNT_KEY)
        # Any: each command of the pipeline has its own type of reply.
        replies = await self._state.run(cast(Awaitable[list[Any]], pipe.execute(raise_on_error=False)))
        body = cast(str | None, unless_garbage(replies[0], None))
        meta, noted = (cast(dict[str, str], unless_garbage(reply, {})) for reply in replies[1:3])
        stored_epoch = _epoch_from(meta.get("epoch", ""))
        if stored_epoch is None:
            return None
        journal, learnt = _journal_from(noted), _learnt_from(cast(str | None, unless_garbage(replies[3], None)))
        try:
            layout = _layout_from(body or "")
            if layout.epoch != stored_epoch:
                raise ValueError(f"its epoch is {layout.epoch}, but the stored one is {stored_epoch}")
            partial = _partial_from(meta.get("partial", "[]"))
            return StoredLayout(layout, _MODEL.validate_json(meta["model"]), partial, journal, learnt)
        except (KeyError, ValueError, binascii.Error, DecodeError, ValidationError, BallastError) as error:
            get_logger().error("stored layout cannot be read and will be planned again", why=str(error))
            return StoredLayout(Layout(stored_epoch, 0, (), "unreadable"), None, (), journal, learnt)

    async def write(self, command: WriteLayout) -> WriteOutcome:
        args = [
            "" if command.expected_epoch is None else str(command.expected_epoch),
            str(command.token),
            str(command.layout.epoch),
            _layout_body(command.layout),
            _MODEL.dump_json(command.model).decode(),
            LAYOUT_CHANNEL,
            _PARTIAL.dump_json(command.partial).decode(),
        ]
        # Any: a script's result has no type.
        script = cast(Awaitable[Any], self._write(keys=[LAYOUT_KEY, META_KEY, lease_key("planner")], args=args))
        try:
            return WriteOutcome[str(await self._state.run(script))]
        except Unavailable as error:
            get_logger().warning("layout not written", epoch=command.layout.epoch, why=error.why)
            return WriteOutcome.UNAVAILABLE

    async def write_reach(self, reach: Reach, token: int) -> None:
        args = [str(token), write_reach(reach), LAYOUT_CHANNEL]
        keys = [REACH_KEY, lease_key("planner")]
        await self._state.run(cast(Awaitable[Any], self._write_value(keys=keys, args=args)))  # Any: as above

    async def write_learnt(self, learnt: Learnt, token: int) -> None:
        args = [str(token), _LEARNT.dump_json(learnt).decode(), ""]
        keys = [LEARNT_KEY, lease_key("planner")]
        await self._state.run(cast(Awaitable[Any], self._write_value(keys=keys, args=args)))  # Any: as above

    async def write_journal(self, command: WriteJournal) -> WriteOutcome:
        journal = command.journal
        conditional = journal.stage in (Stage.PREPARING, Stage.COMMITTING)
        expected = "" if command.expected_epoch is None else str(command.expected_epoch)
        args = [
            expected if conditional else "-",
            str(command.token),
            str(journal.epoch),
            _layout_body(journal.target) if journal.stage is Stage.COMMITTING else "",
            _MODEL.dump_json(command.model).decode(),
            LAYOUT_CHANNEL,
            _PARTIAL.dump_json(command.partial).decode(),
            journal.stage.value,
            _journal_body(journal),
        ]
        keys = [LAYOUT_KEY, META_KEY, lease_key("planner"), JOURNAL_KEY]
        # Any: a script's result has no type.
        script = cast(Awaitable[Any], self._write_journal(keys=keys, args=args))
        try:
            return WriteOutcome[str(await self._state.run(script))]
        except Unavailable as error:
            get_logger().warning("transition not journaled", epoch=journal.epoch, stage=journal.stage, why=error.why)
            return WriteOutcome.UNAVAILABLE


def _layout_body(layout: Layout) -> str:
    return base64.b64encode(codec.LAYOUT.message(layout).SerializeToString(deterministic=True)).decode()


def _layout_from(body: str) -> Layout:
    layout = codec.LAYOUT.record(pb.Layout.FromString(base64.b64decode(body, validate=True)))
    layout.check()
    return layout


def _epoch_from(text: str) -> Epoch | None:
    """Parse the stored epoch; None if it is invalid, which counts as nothing stored."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= border.MAX_EPOCH):
        return None
    return Epoch(int(text))


def _partial_from(text: str) -> Partial:
    return tuple((WorkerId(w), Incarnation(incarnation)) for w, incarnation in _PARTIAL.validate_json(text))


def _learnt_from(text: str | None) -> Learnt:
    """Parse the learned data; empty if no valid data is stored."""
    try:
        learnt = Learnt() if text is None else _LEARNT.validate_json(text)
    except ValidationError as error:
        get_logger().error("learned data cannot be read and will be learned again", why=str(error))
        return Learnt()
    return learnt if learnt.is_believable else Learnt()


def _journal_body(journal: Journal) -> str:
    body = _JournalBody(
        journal.kind, _layout_body(journal.base), _layout_body(journal.target), journal.why, journal.failure
    )
    return _JOURNAL.dump_json(body).decode()


def _journal_from(noted: dict[str, str]) -> Journal | None:
    """Parse the stored journal; None if there is none, or it cannot be read, for example because of another version."""
    if not noted:
        return None
    try:
        body = _JOURNAL.validate_json(noted["body"])
        stage = Stage(noted["stage"])
        return Journal(body.kind, _layout_from(body.base), _layout_from(body.target), stage, body.why, body.failure)
    except (KeyError, ValueError, binascii.Error, DecodeError, ValidationError, BallastError) as error:
        get_logger().error("journal of a transition cannot be read and is not used", why=str(error))
        return None
