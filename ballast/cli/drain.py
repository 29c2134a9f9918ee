"""`ballast drain WORKER`: takes a worker out of routing; its running requests finish."""

import argparse
import asyncio

import grpc

from ballast.cli.arguments import Commands, add_address
from ballast.client import AsyncClient, ClusterStatus
from ballast.common.errors import NotFound
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 10.0


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "drain",
        help="take a worker or a dispatcher out of service; what runs there finishes",
        description="It takes no new requests from now on, and may be stopped when nothing runs there any more.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("name", metavar="WORKER", help="as `ballast status` names it; or a dispatcher's HOST:PORT")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    count = asyncio.run(_drain(args.name, args.address))
    print(f"{args.name} takes nothing new; {count} request{'' if count == 1 else 's'} still running there")
    return 0


async def _drain(name: str, address: str) -> int:
    if ":" in name:
        async with AsyncClient(name) as dispatcher:
            return await dispatcher.drain(name)
    async with AsyncClient(address) as client:
        worker_address = find_worker(await client.status(), name)
    async with open_channel(worker_address) as channel:
        try:
            response = await worker_pb2_grpc.WorkerServiceStub(channel).Drain(
                worker_pb2.DrainRequest(), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error, worker_address) from error
    return response.running_request_count


def find_worker(status: ClusterStatus, name: str) -> str:
    """Its address.

    Raises:
        NotFound: no such worker; says which there are.
    """
    for worker in status.workers:
        if worker.worker_id == name:
            return worker.address
    known = ", ".join(worker.worker_id for worker in status.workers) or "none"
    raise NotFound(f"no worker is called {name}; there are: {known}")
