"""State tables of a member in a transition, one for a drop and one for a restore, executed by `core.transition` (pure).

A row lists the events that a state handles. Other events are ignored, because any event may arrive twice, late or
never. `On`: the first entry for an event whose condition holds is taken. `Then`: entries without an event, tried in
order after each event until no condition holds. `docs/transitions.md` is generated from the tables.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from ballast.common.transition import Phase
from services.worker.core import transition_messages as t
from services.worker.core.transition_state import TransitionState as S


class State(StrEnum):
    """State of a member in a transition, finer than the `Phase` that the planner sees."""

    NEW = "new"
    PREPARING = "preparing"
    LIMITING = "limiting"
    AWAITING_ROOM = "awaiting room"
    LOADING = "loading"
    PREPARED = "prepared"
    QUIESCING = "quiescing"
    TAKING_UP = "taking up"
    DRAINING = "draining"
    GATHERING = "gathering"
    EXCHANGING = "exchanging"
    DONE = "done"
    FAILED = "failed"
    UNDOING = "undoing"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class On:
    event: type
    to: State | None  # None: unchanged
    do: Callable[[S, Any], list[t.Command]]
    when: Callable[[S, Any], bool] | None = None


@dataclass(frozen=True, slots=True)
class Then:
    to: State | None  # None: unchanged; `do` then makes `when` false
    do: Callable[[S], list[t.Command]] | None
    when: Callable[[S], bool]


@dataclass(frozen=True, slots=True)
class Row:
    """One state of a table. `deadline_s`: the member's own deadline; None: the planner ends the phase, or the member is
    at rest. `way_out`: when the deadline begins to count, and what happens when it passes.
    """

    phase: Phase
    does: str
    ways: tuple[On | Then, ...] = ()
    deadline_s: float | None = None
    way_out: str = "at rest"


BEFORE_COMMIT = (Phase.PREPARING, Phase.PREPARED)
_FORGOTTEN_S = 15.0  # silence of the planner after which a member no longer commits a transition
_FORGOTTEN = "counted from the planner's last request: the transition fails"
_OVERDUE = "a plan without this worker's group follows: it leaves"


def _fails(aborted: State) -> tuple[On, ...]:
    return (
        On(t.PreparationFailed, State.FAILED, S.fail),
        On(t.AbortRequested, aborted, S.fail),
        On(t.PeerLost, State.FAILED, S.fail, when=S.is_peer),
    )


_EARLY = (  # sent by members that have received Commit earlier
    On(t.EpochEnded, None, S.note_end),
    On(t.HandoverReceived, None, S.note_handover),
)
_BREAKS = On(t.PeerLost, State.FAILED, S.break_up, when=S.is_peer)
_GIVES = (
    On(t.RosterReceived, None, S.take_roster, when=S.is_next_roster),
    On(t.KvSent, None, S.note_sent),
)
_KV = (
    *_GIVES,
    On(t.KvReceived, None, S.take_kv),
    On(t.KvCompleteReceived, None, S.note_complete),
)
_BOTH = {
    State.NEW: Row(
        Phase.PREPARING,
        "receives the plan",
        (On(t.PrepareRequested, State.PREPARING, S.begin),),
        way_out="at once",
    ),
    State.DONE: Row(Phase.DONE, "at rest"),
    State.FAILED: Row(
        Phase.FAILED,
        "before the commit: undone. After it: requests are replayed elsewhere, missing layers are loaded again",
        (On(t.AbortRequested, State.ABORTED, S.note_abort),),
        deadline_s=30.0,
        way_out="after the commit, for transfers to end: the process ends. Reading the checkpoint has no deadline",
    ),
    State.ABORTED: Row(Phase.ABORTED, "at rest"),
}


_DROP_FAILS = (*_fails(State.ABORTED), *_EARLY)
_RESTORE_FAILS = (*_fails(State.UNDOING), *_EARLY)


def _preparing(does: str, *ways: On | Then) -> Row:
    return Row(Phase.PREPARING, does, ways, _FORGOTTEN_S, _FORGOTTEN)


def _prepared(*ways: On) -> Row:
    return Row(Phase.PREPARED, "continues serving as before", ways, _FORGOTTEN_S, _FORGOTTEN)


DROP: Mapping[State, Row] = MappingProxyType(
    {
        **_BOTH,
        State.PREPARING: _preparing(
            "links are opened; checksums of the layers to be dropped are computed",
            On(t.LinksUp, None, S.note_links),
            On(t.MemoryReady, None, S.note_memory),
            Then(State.PREPARED, None, when=S.prepared),
            *_DROP_FAILS,
        ),
        State.PREPARED: _prepared(On(t.CommitRequested, State.QUIESCING, S.quiesce), *_DROP_FAILS),
        State.QUIESCING: Row(
            Phase.COMMITTING,
            "a leader forms no batch while the last ones complete; a follower waits until its leader reports their end",
            (
                On(t.BoundaryReached, State.TAKING_UP, S.end_epoch),
                *_EARLY,
                On(t.RosterReceived, None, S.refuse_roster, when=S.is_next_roster),
                _BREAKS,
                Then(State.TAKING_UP, S.take_up, when=S.may_follow),
            ),
            way_out=_OVERDUE,
        ),
        State.TAKING_UP: Row(
            Phase.COMMITTING,
            "between two batches: memory is remapped and the role changes",
            (
                On(t.TakenUp, State.GATHERING, S.hand_over, when=S.is_to_lead),
                On(t.TakenUp, State.EXCHANGING, S.hand_over),
            ),
            way_out="at once",
        ),
        State.GATHERING: Row(
            Phase.EXCHANGING,
            "the new leader forms no batch until every member is ready for its new role",
            (
                On(t.HandoverReceived, None, S.note_handover),
                *_GIVES,
                _BREAKS,
                Then(State.EXCHANGING, S.lead, when=S.all_handed_over),
            ),
            way_out=_OVERDUE,
        ),
        State.EXCHANGING: Row(
            Phase.EXCHANGING,
            "the group serves new requests; KV of victims is transferred in waves, limited by free memory",
            (
                On(t.Led, None, S.led, when=S.is_own_wave),
                *_KV,
                On(t.WaveDone, None, S.note_wave_done, when=S.is_in_wave),
                _BREAKS,
                Then(None, S.leave_wave, when=S.wave_is_over),
                Then(State.DONE, S.release, when=S.is_done),
            ),
            way_out=_OVERDUE,
        ),
    }
)

RESTORE: Mapping[State, Row] = MappingProxyType(
    {
        **_BOTH,
        State.PREPARING: _preparing(
            "links are opened",
            On(t.LinksUp, State.LIMITING, S.note_links, when=S.is_leader),
            On(t.LinksUp, State.AWAITING_ROOM, S.note_links),
            On(t.RoomGranted, None, S.note_room),
            *_RESTORE_FAILS,
        ),
        State.LIMITING: _preparing(
            "the leader limits the group's blocks, and waits until no request holds a block beyond the limit",
            On(t.GroupLimited, None, S.note_room),
            On(t.LimitHeld, State.LOADING, S.grant_room),
            *_RESTORE_FAILS,
        ),
        State.AWAITING_ROOM: _preparing(
            "a follower waits until its leader grants it room",
            On(t.RoomGranted, None, S.note_room),
            Then(State.LOADING, S.load_layers, when=S.has_room),
            *_RESTORE_FAILS,
        ),
        State.LOADING: _preparing(
            "layers are loaded into the free room and verified",
            On(t.MemoryReady, State.PREPARED, S.note_memory),
            On(t.RoomGranted, None, S.shrink_group),
            *_RESTORE_FAILS,
        ),
        State.PREPARED: _prepared(
            On(t.CommitRequested, State.TAKING_UP, S.take_up),
            On(t.RoomGranted, None, S.shrink_group),
            *_RESTORE_FAILS,
        ),
        State.TAKING_UP: Row(
            Phase.COMMITTING,
            "at once: the member creates its own KV cache in the free memory, while the group continues",
            (On(t.TakenUp, State.DRAINING, S.note_own),),
            way_out="at once",
        ),
        State.DRAINING: Row(
            Phase.EXCHANGING,
            "each member serves alone; the group's sequences end, or move to a member (on Abort: immediately)",
            (
                On(t.GroupEnded, None, S.end_group),
                *_EARLY,
                On(t.AbortRequested, None, S.yield_to_changes),
                On(t.PeerLost, None, S.empty, when=S.is_peer),
                *_GIVES,
                Then(State.GATHERING, S.close, when=S.group_ended),
            ),
            way_out=_OVERDUE,
        ),
        State.GATHERING: Row(
            Phase.EXCHANGING,
            "the group computes no more batches; its remaining sequences are handed over with their KV",
            (
                On(t.HandoverReceived, None, S.note_handover),
                On(t.PeerLost, None, S.lose, when=S.is_peer),
                *_GIVES,
                Then(State.EXCHANGING, S.lead, when=S.all_handed_over),
            ),
            way_out=_OVERDUE,
        ),
        State.EXCHANGING: Row(
            Phase.EXCHANGING,
            "their KV is transferred",
            (
                On(t.Led, None, S.led, when=S.is_own_wave),
                *_KV,
                On(t.PeerLost, State.FAILED, S.break_up, when=S.awaits_kv_of),
                On(t.PeerLost, None, S.lose, when=S.is_peer),
                Then(State.DONE, S.release, when=S.is_done),
            ),
            way_out=_OVERDUE,
        ),
        State.FAILED: replace(
            _BOTH[State.FAILED],
            ways=(
                On(t.LayersGivenUp, None, S.note_undone),
                On(t.AbortRequested, State.ABORTED, S.note_abort, when=S.is_undone),
                On(t.AbortRequested, State.UNDOING, S.note_abort),
            ),
        ),
        State.UNDOING: Row(
            Phase.ABORTED,
            "the loaded layers are dropped again, once no write into them is under way",
            (On(t.LayersGivenUp, State.ABORTED, S.note_undone),),
            way_out="transfers that are under way end",
        ),
    }
)


def deadline_s(phase: Phase) -> float:
    """The member's own deadline in a phase (seconds): the shortest deadline of the phase's states; infinity: none."""
    rows = [row for table in (DROP, RESTORE) for row in table.values() if row.phase is phase]
    return min((row.deadline_s for row in rows if row.deadline_s is not None), default=math.inf)
