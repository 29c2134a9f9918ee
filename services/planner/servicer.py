"""PlannerService: converts protobuf."""

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from ballast.common.errors import InvalidRequest, NotActive, NotPossible
from ballast.common.ids import Epoch, WorkerId
from ballast.rpc import codec
from ballast.rpc.deadline import remaining_s
from ballast.rpc.server import when_done
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from services.planner.core import messages as p
from services.planner.core.change_requests import explain_now
from services.planner.core.prediction_log import Predicted
from services.planner.core.record import TransitionRecord
from services.planner.core.stages import Stage
from services.planner.core.survey import NoSurvey
from services.planner.shell.planner import PlannerShell

_LONGEST_HOLD_S = 7 * 86400.0
_LONGEST_WAIT_S = 10.0  # maximum wait of a call for the core's answer

# Any: the message types of a call are irrelevant to its context.
_Context = grpc.aio.ServicerContext[Any, Any]


class PlannerServicer(planner_pb2_grpc.PlannerServiceServicer):
    def __init__(self, shell: PlannerShell) -> None:
        self._shell = shell

    async def GetLayout(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.GetLayoutRequest, context: _Context
    ) -> pb.GetLayoutResponse:
        return pb.GetLayoutResponse(
            layout=codec.LAYOUT.message(self._shell.core.layout),
            planner_id=self._shell.planner_id,
            active=self._shell.core.active,
            kept_out=dict(self._kept_out()),
        )

    async def WatchLayout(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.WatchLayoutRequest, context: _Context
    ) -> AsyncIterator[pb.WatchLayoutResponse]:
        watcher = self._shell.watch()
        when_done(context, lambda: self._shell.unwatch(watcher))
        while True:
            yield pb.WatchLayoutResponse(layout=codec.LAYOUT.message(await watcher.next()))

    async def DrainWorker(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.DrainWorkerRequest, context: _Context
    ) -> pb.DrainWorkerResponse:
        if not request.worker_id:
            raise InvalidRequest("worker_id", "must not be empty")
        if not request.request_id:
            raise InvalidRequest("request_id", "must not be empty; any unique name will do")
        epoch = await self._shell.drain(request.request_id, WorkerId(request.worker_id), self._timeout_s(context))
        return pb.DrainWorkerResponse(epoch=epoch)

    async def ParkWorker(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.ParkWorkerRequest, context: _Context
    ) -> pb.ParkWorkerResponse:
        return pb.ParkWorkerResponse(epoch=await self._stand(request, context, away=True))

    async def WakeWorker(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.WakeWorkerRequest, context: _Context
    ) -> pb.WakeWorkerResponse:
        return pb.WakeWorkerResponse(epoch=await self._stand(request, context, away=False))

    async def _stand(
        self, request: pb.ParkWorkerRequest | pb.WakeWorkerRequest, context: _Context, *, away: bool
    ) -> Epoch:
        if not request.worker_id:
            raise InvalidRequest("worker_id", "must not be empty")
        cause_id = f"{self._shell.planner_id}/{request.request_id}"
        worker_id = WorkerId(request.worker_id)
        event = p.StandingRequested(time.monotonic(), cause_id, request.request_id, worker_id, away)
        return (await self._change(event, context)).epoch

    # ------------------------------------------------------------ transitions

    async def ExplainPlan(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.ExplainPlanRequest, context: _Context
    ) -> pb.ExplainPlanResponse:
        required = _required(request)
        core = self._shell.core
        if not core.active:
            raise NotActive(self._shell.planner_id)
        load, kept_out = await self._shell.load(), self._kept_out()
        try:
            targets = core.conductor.rules.planning.targets
            told = explain_now(core.layout, core.layout_model, load.without(dict(kept_out)), required, targets)
        except NoSurvey as reason:
            raise NotPossible(str(reason)) from reason
        return pb.ExplainPlanResponse(
            lines=[*told.lines, *(f"{name} is kept out: {why}" for name, why in sorted(kept_out))],
            required_bytes=told.required_bytes,
            freed_bytes=told.freed_bytes,
            shortfall_bytes=told.shortfall_bytes,
            layout=codec.LAYOUT.message(told.layout),
            predictions=[
                _predicted_to_proto(one, time.monotonic()) for one in core.conductor.prediction_log.newest_first()
            ],
        )

    async def Drop(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.DropRequest, context: _Context
    ) -> pb.DropResponse:
        names = tuple(WorkerId(name) for name in request.worker_ids)
        required = _required(request)
        if names and required is not None:
            raise InvalidRequest("worker_ids", "cannot be combined with required_bytes")
        at_s, cause_id = time.monotonic(), f"{self._shell.planner_id}/{request.request_id}"
        if not 0.0 <= request.hold_s <= _LONGEST_HOLD_S:
            raise InvalidRequest("hold_s", f"must be between 0 and {_LONGEST_HOLD_S:g}, got {request.hold_s:g}")
        event = p.DropRequested(at_s, cause_id, request.request_id, required, names, request.hold_s)
        answer = await self._change(event, context)
        return pb.DropResponse(epoch=answer.epoch, lines=answer.lines)

    async def Restore(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.RestoreRequest, context: _Context
    ) -> pb.RestoreResponse:
        cause_id = f"{self._shell.planner_id}/{request.request_id}"
        answer = await self._change(p.RestoreRequested(time.monotonic(), cause_id, request.request_id), context)
        return pb.RestoreResponse(epoch=answer.epoch)

    async def ListTransitions(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.ListTransitionsRequest, context: _Context
    ) -> pb.ListTransitionsResponse:
        now_s = time.monotonic()
        conductor = self._shell.core.conductor
        return pb.ListTransitionsResponse(
            transitions=[
                _transition(record, conductor.prediction_log.of(record.epoch), now_s) for record in conductor.records()
            ],
            overload_policy=conductor.rules.policy,
            held_s=conductor.held_s(now_s),
        )

    def _kept_out(self) -> list[tuple[str, str]]:
        return list(self._shell.core.kept_out.why(time.monotonic()).items())

    async def _change(self, event: p.ChangeRequest | p.StandingRequested, context: _Context) -> p.AnswerChange:
        if not event.request_id:
            raise InvalidRequest("request_id", "must not be empty; any unique name will do")
        return await self._shell.change(event, self._timeout_s(context))

    def _timeout_s(self, context: _Context) -> float:
        left_s = remaining_s(context)
        return _LONGEST_WAIT_S if left_s is None else min(left_s, _LONGEST_WAIT_S)


def _required(request: pb.ExplainPlanRequest | pb.DropRequest) -> int | None:
    if not request.HasField("required_bytes"):
        return None
    if request.required_bytes < 1:
        raise InvalidRequest("required_bytes", f"must be positive, got {request.required_bytes}")
    return request.required_bytes


def _predicted_to_proto(predicted: Predicted, now_s: float) -> pb.Prediction:
    served, settled_at_s = predicted.served, predicted.settled_at_s
    outcome = None
    if served is not None and settled_at_s is not None:
        outcome = pb.Outcome(
            after_s=settled_at_s - predicted.at_s,
            first_count=served.first_count,
            ttft_p99_s=served.ttft_p99_s,
            tpot_s=served.tpot_s,
            tokens_per_s=predicted.tokens_per_s,
        )
    return pb.Prediction(
        decision=predicted.decision,
        age_s=now_s - predicted.at_s,
        horizon_s=predicted.horizon_s,
        ttft_p99_s=predicted.predicted.ttft_p99_s,
        tpot_s=predicted.predicted.tpot_s,
        outcome=outcome,
        summary=predicted.told(now_s),
    )


def _transition(record: TransitionRecord, predicted: Predicted | None, now_s: float) -> pb.Transition:
    journal = record.journal
    return pb.Transition(
        epoch=record.epoch,
        kind=str(journal.kind),
        phase=str(journal.stage),
        reason=journal.why,
        summary=record.summary,
        age_s=now_s - record.began_at_s,
        prepare_s=record.prepare_s,
        commit_s=record.seconds_in(Stage.COMMITTING),
        exchange_s=record.seconds_in(Stage.EXCHANGING),
        remap_s=record.longest_s("remap_s"),
        freed_parameter_bytes=record.total("freed_parameter_bytes"),
        kv_bytes_exchanged=record.total("kv_bytes_sent"),
        parameter_bytes_pulled=record.total("parameter_bytes_pulled"),
        victim_count=record.victim_count,
        victims_recomputed=record.total("victims_recomputed"),
        max_stall_s=record.longest_s("max_stall_s"),
        p99_stall_s=record.longest_s("p99_stall_s"),
        waves=record.waves,
        layers_s=record.longest_s("layers_s"),
        prediction=None if predicted is None else _predicted_to_proto(predicted, now_s),
    )
