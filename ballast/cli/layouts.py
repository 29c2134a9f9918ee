"""`ballast plan`, `drop`, `restore` and `transitions`: what the planner would do, does, and has done."""

import argparse
import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import grpc

from ballast.cli.arguments import Commands, add_address
from ballast.common.errors import Unavailable
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc

if TYPE_CHECKING:
    from ballastpb.planner.v1.planner_pb2_grpc import PlannerServiceAsyncStub

_TIMEOUT_S = 15.0
_POLL_S = 0.1
_METHODS = ("auto", "figure6", "exact", "search", "even", "memory-greedy", "usable")

T = TypeVar("T")
Ask: TypeAlias = "Callable[[PlannerServiceAsyncStub], Awaitable[T]]"


def add_parser(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="what would be dropped now, and why; changes nothing",
        description="The plan for the demand of this moment, or for so many bytes of KV memory.",
    )
    plan.set_defaults(run=run_plan)
    plan.add_argument("--explain", action="store_true", help="groups, layers and costs too, not only the outcome")
    plan.add_argument("--bytes", type=_positive, metavar="N", help="KV memory to free (default: what demand lacks)")
    plan.add_argument("--method", choices=_METHODS, default="auto")
    drop = commands.add_parser(
        "drop",
        help="drop replicated layers now, so that their memory becomes KV",
        description="Merges groups into pipelines. Requests go on; the ones that run are moved with their KV.",
    )
    drop.set_defaults(run=run_drop)
    what = drop.add_mutually_exclusive_group()
    what.add_argument("--bytes", type=_positive, metavar="N", help="KV memory to free (default: what demand lacks)")
    what.add_argument("--workers", metavar="A,B", help="merge exactly these, in this order")
    drop.add_argument("--method", choices=_METHODS, help="how groups are chosen (default: auto)")
    restore = commands.add_parser(
        "restore", help="bring all dropped layers back now", description="Dissolves all pipelines, whatever the load."
    )
    restore.set_defaults(run=run_restore)
    listing = commands.add_parser("transitions", help="drops and restores: the one under way and the last ones")
    listing.set_defaults(run=run_transitions)
    for parser in (plan, drop, restore, listing):
        add_address(parser)
        parser.add_argument("--planner", metavar="HOST:PORT", help="ask this planner itself, past the dispatchers")
    for parser in (drop, restore):
        parser.add_argument("--no-wait", action="store_true", help="return once the plan is journaled")


def run_plan(args: argparse.Namespace) -> int:
    request = pb.ExplainPlanRequest(required_bytes=args.bytes, method=args.method)
    answer = _ask(args, lambda planner: planner.ExplainPlan(request, timeout=_TIMEOUT_S))
    print("\n".join(answer.lines if args.explain else answer.lines[:1]))
    return 0


def run_drop(args: argparse.Namespace) -> int:
    names: list[str] = args.workers.split(",") if args.workers else []
    request = pb.DropRequest(
        required_bytes=args.bytes, method=args.method or "", worker_ids=names, request_id=_new_request_id()
    )

    async def drop(planner: "PlannerServiceAsyncStub") -> int:
        answer = await planner.Drop(request, timeout=_TIMEOUT_S)
        print("\n".join(answer.lines))
        return 0 if args.no_wait else await _await_end(planner, answer.epoch)

    return _ask(args, drop)


def run_restore(args: argparse.Namespace) -> int:
    async def restore(planner: "PlannerServiceAsyncStub") -> int:
        answer = await planner.Restore(pb.RestoreRequest(request_id=_new_request_id()), timeout=_TIMEOUT_S)
        return 0 if args.no_wait else await _await_end(planner, answer.epoch)

    return _ask(args, restore)


def run_transitions(args: argparse.Namespace) -> int:
    request = pb.ListTransitionsRequest()
    answer = _ask(args, lambda planner: planner.ListTransitions(request, timeout=_TIMEOUT_S))
    for one in answer.transitions:
        print(_line(one))
    if not answer.transitions:
        print("none since this planner leads")
    return 0


async def _await_end(planner: "PlannerServiceAsyncStub", epoch: int) -> int:
    """Exit status 0 if it takes effect, 1 if it is taken back. Interrupting only stops the waiting."""
    while True:
        answer = await planner.ListTransitions(pb.ListTransitionsRequest(), timeout=_TIMEOUT_S)
        found = next((one for one in answer.transitions if one.epoch == epoch), None)
        if found is None:
            raise Unavailable("planner", f"it knows nothing of epoch {epoch}; `ballast status` shows what is in force")
        if found.phase in ("done", "aborted"):
            print(_line(found))
            return 0 if found.phase == "done" else 1
        await asyncio.sleep(_POLL_S)


def _line(one: pb.Transition) -> str:
    times = f"prepare {one.prepare_s:.3f} s, commit {one.commit_s:.3f} s, exchange {one.exchange_s:.3f} s"
    return f"epoch {one.epoch} {one.kind} {one.phase}, {one.age_s:.0f} s ago ({one.reason}; {times}): {one.summary}"


def _ask(args: argparse.Namespace, ask: "Ask[T]") -> T:
    """Of a dispatcher, which passes it on to the active planner."""

    async def run() -> T:
        address = args.planner or args.address
        async with open_channel(address) as channel:
            try:
                return await ask(planner_pb2_grpc.PlannerServiceStub(channel))
            except grpc.RpcError as error:
                raise from_rpc_error(error, address) from error

    return asyncio.run(run())


def _new_request_id() -> str:
    return f"cli-{secrets.token_hex(6)}"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value
