"""What the planner says about the transitions of a run."""

import grpc

from ballast.bench.records import PlannerTransition
from ballast.common.errors import BallastError
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc

_TIMEOUT_S = 5.0


async def list_transitions(address: str) -> list[PlannerTransition]:
    """Those that the planner at host:port remembers, oldest first.

    Raises:
        BallastError: it does not answer.
    """
    async with open_channel(address) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        try:
            answer = await stub.ListTransitions(planner_pb2.ListTransitionsRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error, address) from error
    return [_from_proto(transition) for transition in reversed(answer.transitions)]


async def transitions_or_why(address: str) -> tuple[list[PlannerTransition], str]:
    """The second: why there are none, for a run that is worth keeping without them."""
    try:
        return await list_transitions(address), ""
    except BallastError as error:
        return [], str(error)


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
