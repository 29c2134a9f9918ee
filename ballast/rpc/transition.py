"""Conversion of types in calls between planner and members (transitions) from and to protobuf."""

from ballast.common.transition import Phase, Status, TransitionKind
from ballast.rpc.mapping import EnumMapper, Mapper
from ballastpb.worker.v1 import worker_pb2 as pb

_ENUMS = pb.DESCRIPTOR.enum_types_by_name
KIND = EnumMapper(TransitionKind, _ENUMS["TransitionKind"])
PHASE = EnumMapper(Phase, _ENUMS["TransitionPhase"], unknown=Phase.NONE)
STATUS = Mapper(Status, pb.TransitionStatus)
