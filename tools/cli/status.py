"""`ballast status`: shows the cluster on one page, or as JSON."""

import argparse

from rich.console import Console

from ballast.client import Client
from tools.cli.arguments import Commands, add_address, add_json
from tools.cli.looks import query_dispatchers
from tools.cli.output import plain, print_json
from tools.cli.render import render_status


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "status",
        help="show layout, load and memory of the cluster",
        description="The requests of several dispatchers (--address A,B) are summed, as each knows only its own.",
    )
    parser.set_defaults(run=run)
    add_json(parser)
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    with Client(args.address) as client:
        look = query_dispatchers(client)
    if args.json:
        print_json({**plain(look.status), "dispatchers": [plain(one) for one in look.dispatchers]})
    else:
        Console().print(render_status(look))
    return 0
