"""Types that the mapper refuses at construction, and how it names the field of a message that it refuses."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from ballast.common.errors import InvalidRequest, InvariantViolation
from ballast.common.ids import Epoch
from ballast.common.layout import Layout
from ballast.common.transition import Phase, TransitionKind
from ballast.rpc import codec
from ballast.rpc.mapping import EnumMapper, Mapper
from ballast.rpc.transition import KIND, PHASE
from ballastpb.cluster.v1 import cluster_pb2 as pb
from ballastpb.worker.v1 import stage_pb2, worker_pb2


@dataclass(frozen=True)
class Chosen:
    token_id: int
    logprob: float
    token: bytes = b""


@dataclass(frozen=True)
class WrongUnit:
    epoch: int
    age_ms: float


def positive(value: int) -> str:
    return "" if value > 0 else f"must be positive, got {value}"


@dataclass(frozen=True)
class Counted:
    sequence_id: Annotated[int, positive]
    computed_tokens: int
    old_leader: str


@dataclass(frozen=True)
class Listed:
    victims: tuple[Counted, ...]
    recomputed: frozenset[int]


@dataclass(frozen=True)
class Token:
    chosen: Chosen
    top: tuple[tuple[int, float], ...]


COUNTED = Mapper(Counted, stage_pb2.Victim, ignored=("donor", "donated_count"))
LISTED = Mapper(Listed, stage_pb2.Roster, ignored=("epoch", "wave", "last"))


def test_a_field_without_a_counterpart_is_refused_when_the_mapper_is_made() -> None:
    with pytest.raises(InvariantViolation, match="age_ms is no field of the message"):
        Mapper(WrongUnit, worker_pb2.AbortRequest)
    with pytest.raises(InvariantViolation, match="logprob is no field of the record"):
        Mapper(dataclass_of("token_id"), pb.TokenLogprob)


def dataclass_of(name: str) -> type:
    return dataclass(frozen=True)(type("Some", (), {"__annotations__": {name: int}}))


def test_a_range_in_addition_to_the_type_is_checked_and_the_path_names_the_field() -> None:
    message = stage_pb2.Roster(victims=[stage_pb2.Victim(sequence_id=1), stage_pb2.Victim(sequence_id=-3)])
    with pytest.raises(InvalidRequest) as refused:
        LISTED.record(message)
    assert refused.value.field == "victims[1].sequence_id"
    assert "must be positive, got -3" in refused.value.why


def test_values_that_a_message_field_cannot_hold_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as refused:
        LISTED.message(Listed((Counted(1, 2**40, "w1"),), frozenset()))
    assert refused.value.field == "computed_tokens"


def test_sets_are_sorted_and_pairs_are_messages() -> None:
    assert list(LISTED.message(Listed((), frozenset((9, 3, 5)))).recomputed) == [3, 5, 9]
    mapper = Mapper(Token, pb.Logprobs, ignored=("prompt",))
    token = Token(Chosen(3, -0.5), ((3, -0.5), (4, -1.5)))
    message = mapper.message(token)
    assert (message.chosen.token_id, message.top[1].token_id, message.top[1].logprob) == (3, 4, -1.5)
    assert mapper.record(message) == token


def test_given_fields_are_passed_by_the_caller_in_both_directions() -> None:
    mapper = Mapper(Counted, stage_pb2.Victim, given=("old_leader",), ignored=("donor", "donated_count"))
    assert mapper.message(Counted(1, 2, "w9"), old_leader="w1").old_leader == "w1"
    assert mapper.record(stage_pb2.Victim(sequence_id=1), old_leader="w2") == Counted(1, 0, "w2")


def test_enums_are_mapped_by_name() -> None:
    assert KIND.number_of[TransitionKind.RESTORE] == worker_pb2.TRANSITION_KIND_RESTORE
    assert KIND.member(worker_pb2.TRANSITION_KIND_DROP) is TransitionKind.DROP
    with pytest.raises(InvalidRequest, match="kind: unknown value 0; known are drop, restore"):
        KIND.member(0, "kind")
    assert PHASE.member(worker_pb2.TRANSITION_PHASE_UNSPECIFIED) is Phase.NONE
    assert PHASE.member(999) is Phase.NONE  # from a newer peer
    with pytest.raises(InvariantViolation, match="has no value"):
        EnumMapper(Phase, worker_pb2.DESCRIPTOR.enum_types_by_name["TransitionKind"])


def test_a_layout_can_be_read_however_many_instances_its_reason_names() -> None:
    names = " ".join(f"worker-{i}.some.long.domain" for i in range(500))
    layout = Layout(Epoch(3), 1, (), f"loss: {names} remained of a group")
    assert codec.LAYOUT.record(codec.LAYOUT.message(layout)) == layout
    assert layout.reason.startswith("loss: worker-0.some")
