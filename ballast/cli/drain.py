"""`ballast drain WORKER`: takes a worker out of routing; its running requests move to others, or finish."""

import argparse
import asyncio

from ballast.cli.arguments import Commands, add_address, add_json
from ballast.cli.output import print_json
from ballast.client import AsyncClient
from ballast.common.errors import NotFound
from ballast.common.units import counted


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "drain",
        help="take a worker or a dispatcher out of service; what runs there finishes, or moves to other workers",
        description="It takes no new requests from now on, and may be stopped once nothing runs there any more. Running"
        " requests of a worker go on elsewhere as far as there is room.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("name", metavar="WORKER", help="as `ballast status` names it; or a dispatcher's HOST:PORT")
    add_address(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    count = asyncio.run(_drain(args.name, args.address))
    if args.json:
        print_json({"name": args.name, "running_request_count": count})
    else:
        print(f"{args.name} takes nothing new; {counted(count, 'request')} still running there")
    return 0


async def _drain(name: str, address: str) -> int:
    if ":" in name:
        async with AsyncClient(name) as dispatcher:
            return await dispatcher.drain(name)
    async with AsyncClient(address) as client:
        try:
            return await client.drain_worker(name)
        except NotFound as error:
            known = ", ".join(worker.worker_id for worker in (await client.status()).workers) or "none"
            raise NotFound(f"no worker is called {name}; there are: {known}") from error
