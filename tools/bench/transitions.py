"""Asks the planner for the transitions of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from ballast.client.access import Access
from ballast.rpc.errors import from_rpc_error
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from tools.bench.records import PlannerTransition

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PlannerSays:
    """A cluster's overload policy, and the transitions in its planner's history, oldest first."""

    overload_policy: str  # empty if not reported
    transitions: Sequence[PlannerTransition] = ()


async def ask_planner(address: str) -> PlannerSays:
    """Ask the planner at host:port, directly or through a dispatcher that forwards the call.

    Raises:
        BallastError: the planner does not answer.
    """
    access = Access.of()
    async with access.open(address) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(access.bearing(channel))
        try:
            answer = await stub.ListTransitions(planner_pb2.ListTransitionsRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error, address) from error
    return PlannerSays(answer.overload_policy, [_from_proto(one) for one in reversed(answer.transitions)])


def _from_proto(message: planner_pb2.Transition) -> PlannerTransition:
    return PlannerTransition(
        age_s=message.age_s,
        epoch=message.epoch,
        kind=message.kind,
        phase=message.phase,
        reason=message.reason,
        summary=message.summary,
        duration_s=message.prepare_s + message.commit_s + message.exchange_s,
        exchange_s=message.exchange_s,
        freed_parameter_bytes=message.freed_parameter_bytes,
        kv_bytes_exchanged=message.kv_bytes_exchanged,
        parameter_bytes_pulled=message.parameter_bytes_pulled,
        victim_count=message.victim_count,
        victims_recomputed=message.victims_recomputed,
        max_stall_s=message.max_stall_s,
    )
