"""`ballast status`: the cluster on one page, or as JSON."""

import argparse
import dataclasses
import json

from rich.console import Console

from ballast.cli.arguments import Commands, add_address
from ballast.cli.followers import with_followers
from ballast.cli.render import render_status
from ballast.client import Client


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("status", help="layout, load and memory of the cluster")
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="everything, exact, as one JSON object")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    with Client(args.address) as client:
        status = with_followers(client.status())
    if args.json:
        print(json.dumps(dataclasses.asdict(status), indent=2))
    else:
        Console().print(render_status(status))
    return 0
