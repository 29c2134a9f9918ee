"""`ballast drain`: takes a worker or a dispatcher out of routing. A worker's running requests migrate or finish.
`ballast undrain` lets a dispatcher accept requests again; a drained worker stays drained until its process ends.
"""

import argparse
import asyncio

from ballast.client import AsyncClient
from ballast.common.errors import InvalidRequest, NotFound
from ballast.common.units import counted
from tools.cli.arguments import Commands, add_address, add_json
from tools.cli.output import print_json


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "drain",
        help="take a worker or a dispatcher out of service; its running requests finish, or move to other workers",
        description="A drained worker or dispatcher accepts no new requests, and can be stopped when no request"
        " runs on it any more. Running requests of a worker move to others as far as there is room. A"
        " restart ends the draining; `ballast undrain` does so for a dispatcher.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "name", metavar="WORKER", help="id of a worker in `ballast status`, or a dispatcher's HOST:PORT"
    )
    add_address(parser)
    add_json(parser)
    _add_undrain(commands)


def _add_undrain(commands: Commands) -> None:
    parser = commands.add_parser(
        "undrain",
        help="put a drained dispatcher back into service",
        description="The dispatcher accepts requests again. To put a worker back into service, restart its process.",
    )
    parser.set_defaults(run=run_undrain)
    parser.add_argument("name", metavar="HOST:PORT", help="address of the dispatcher")
    add_address(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    count = asyncio.run(_drain(args.name, args.address))
    if args.json:
        print_json({"name": args.name, "running_request_count": count})
    else:
        print(f"{args.name} takes nothing new; {counted(count, 'request')} still running there")
    return 0


def run_undrain(args: argparse.Namespace) -> int:
    if ":" not in args.name:
        why = "is no dispatcher's HOST:PORT; a worker that drains does so for the rest of its life: start it again"
        raise InvalidRequest(args.name, why)
    asyncio.run(_undrain(args.name))
    if args.json:
        print_json({"name": args.name})
    else:
        print(f"{args.name} takes requests again")
    return 0


async def _undrain(address: str) -> None:
    async with AsyncClient(address) as dispatcher:
        await dispatcher.undrain(address)


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
