"""`ballast park` and `ballast wake`: park a worker, which frees its device memory, and wake it, which takes seconds."""

import argparse
import asyncio
import secrets
from typing import TYPE_CHECKING

from ballast.common.errors import NotPossible, Unavailable
from ballast.common.ids import WorkerId
from ballast.common.layout import Standing, group_of
from ballast.rpc.codec import LAYOUT
from ballastpb.planner.v1 import planner_pb2 as pb
from tools.cli.arguments import Commands, add_address, add_json
from tools.cli.output import print_json
from tools.cli.planners import ask_planner

if TYPE_CHECKING:
    from ballastpb.planner.v1.planner_pb2_grpc import PlannerServiceAsyncStub

_TIMEOUT_S = 15.0
_POLL_S = 0.2


def add_parser(commands: Commands) -> None:
    park = commands.add_parser(
        "park",
        help="empty a worker and release its device memory until it is woken",
        description="The worker accepts no new requests, migrates running ones to others, copies its parameters to"
        " host memory and releases its device memory. Its process keeps running: `ballast wake` puts it"
        " back into service within seconds, or at once if it is not empty yet.",
    )
    park.set_defaults(run=run_park)
    wake = commands.add_parser(
        "wake",
        help="put a parked worker back into service",
        description="The worker loads its parameters from host memory and accepts requests again. A worker that is"
        " still being emptied does so at once.",
    )
    wake.set_defaults(run=run_wake)
    for parser in (park, wake):
        parser.add_argument("worker", metavar="WORKER", help="id of the worker in `ballast status`")
        add_address(parser)
        parser.add_argument(
            "--planner", metavar="HOST:PORT", help="address of a planner to call directly, not through dispatchers"
        )
        parser.add_argument("--wait", action="store_true", help="return when the worker is parked, or serves")
        add_json(parser)


def run_park(args: argparse.Namespace) -> int:
    request = pb.ParkWorkerRequest(worker_id=args.worker, request_id=secrets.token_hex(8))

    async def park(planner: "PlannerServiceAsyncStub") -> Standing:
        await planner.ParkWorker(request, timeout=_TIMEOUT_S)
        return await _standing(planner, args, Standing.PARKED)

    return _tell(args, ask_planner(args.planner or args.address, park, is_planner=args.planner is not None))


def run_wake(args: argparse.Namespace) -> int:
    request = pb.WakeWorkerRequest(worker_id=args.worker, request_id=secrets.token_hex(8))

    async def wake(planner: "PlannerServiceAsyncStub") -> Standing:
        await planner.WakeWorker(request, timeout=_TIMEOUT_S)
        return await _standing(planner, args, Standing.SERVING)

    return _tell(args, ask_planner(args.planner or args.address, wake, is_planner=args.planner is not None))


async def _standing(planner: "PlannerServiceAsyncStub", args: argparse.Namespace, wanted: Standing) -> Standing:
    """The worker's standing in the layout; PARKED if it is no longer in the layout, because parking may end its
    process. With `--wait`, poll until the standing is `wanted`.

    Raises:
        Unavailable: it should serve, but its process has ended.
        NotPossible: it should be parked, but serves again, or the reverse.
    """
    while True:
        answer = await planner.GetLayout(pb.GetLayoutRequest(), timeout=_TIMEOUT_S)
        layout = LAYOUT.record(answer.layout)
        group = group_of(layout, WorkerId(args.worker))
        standing = None if group is None else next(m.standing for m in group.members if m.worker_id == args.worker)
        if standing is None and (layout.epoch or not args.wait):  # epoch 0: a new leader has not read the layout
            if args.wait and wanted is Standing.SERVING:
                raise Unavailable(args.worker, "its process has ended; start it again")
            return Standing.PARKED
        if standing is not None and (standing is wanted or not args.wait):
            return standing
        if wanted is Standing.PARKED and standing is Standing.SERVING:
            raise NotPossible(f"{args.worker} serves again: it cannot be parked (its log says why), or was woken")
        if wanted is Standing.SERVING and standing in (Standing.LEAVING, Standing.PARKED):
            raise NotPossible(f"{args.worker} is {standing} again: it was parked meanwhile")
        await asyncio.sleep(_POLL_S)


def _tell(args: argparse.Namespace, standing: Standing) -> int:
    if args.json:
        print_json({"name": args.worker, "standing": standing})
    else:
        print(f"{args.worker} is {standing}")
    return 0
