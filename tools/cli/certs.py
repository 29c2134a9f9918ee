"""`ballast certs`: creates the certificates and the secret with which the services of a cluster authenticate each
other.
"""

import argparse
import json
import socket
from pathlib import Path

from ballast.common.errors import ConfigError
from ballast.common.extras import lacking
from tools.cli.arguments import Commands

_HERE = ("localhost", "127.0.0.1", "::1")


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "certs",
        help="create certificates for the services of a cluster",
        description="Creates a CA, a folder with a certificate for each role (monitor, planner, dispatcher, worker,"
        " gateway, operator) for --tls-dir of the services, and the secret for --cluster-secret-file."
        " Existing files are not changed.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="additional host name or address of dispatchers and gateways, besides this machine's; may be repeated",
    )
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="ID",
        help="create a certificate for this worker id only; may be repeated",
    )
    parser.add_argument(
        "--days", type=int, default=365, metavar="N", help="validity of the certificates (default: 365)"
    )
    parser.add_argument("--renew", action="store_true", help="renew all certificates, with the same CA")
    parser.add_argument("--json", action="store_true", help="print the folders as one JSON object")


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.days <= 3650:
        raise ConfigError("--days", f"must be between 1 and 3650, got {args.days}")
    folders = make(args.out, days=args.days, hosts=args.host, workers=args.worker, renew=args.renew)
    if args.json:
        print(json.dumps({"folders": [str(folder) for folder in folders]}))
    else:
        print("\n".join(str(folder) for folder in folders))
    return 0


def make(folder: Path, *, days: int, hosts: list[str], workers: list[str], renew: bool = False) -> list[Path]:
    """Make the certificates (`make_certificates`). Those of dispatchers and gateways name `hosts` and this machine.

    Raises:
        ConfigError: the package cryptography is not installed.
    """
    try:
        from tools.local.certificates import make_certificates
    except ImportError as error:
        raise lacking("ballast certs", "the package cryptography", "tls") from error
    names = list(dict.fromkeys((*_HERE, socket.gethostname(), *hosts)))
    return make_certificates(folder, days=days, hosts=names, workers=workers, renew=renew)
