"""`ballast tokens`: manages the tokens by which clients authenticate to dispatchers."""

import argparse
import json
from pathlib import Path

from ballast.common.errors import ConfigError, InvalidRequest, NotFound
from ballast.common.sampling import ALL_CLASSES, PriorityClass
from ballast.service.tokens import Token, TokenRole, digest_of, new_token, read_tokens, write_tokens
from tools.cli.arguments import Commands

_MAX_NAME_CHARS = 64


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "tokens",
        help="create, list and revoke the tokens of clients",
        description="The file contains only hashes. Dispatchers (--tokens-file) reload it when it changes.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="create a token and print it, only once")
    add.set_defaults(run=run_add)
    add.add_argument(
        "--role",
        type=TokenRole,
        choices=list(TokenRole),
        default=TokenRole.INFER,
        help="role of the token (default: infer)",
    )
    add.add_argument(
        "--classes",
        metavar="CLASS,...",
        help="permitted classes of its requests: interactive, default, batch (default: all)",
    )
    listing = actions.add_parser("list", help="list names and roles")
    listing.set_defaults(run=run_list)
    remove = actions.add_parser("remove", help="revoke a token; running calls continue")
    remove.set_defaults(run=run_remove)
    for action in (add, remove):
        action.add_argument("name", metavar="NAME", help="name of the token's user")
    for action in (add, listing, remove):
        action.add_argument("--file", type=Path, required=True, metavar="FILE", help="--tokens-file of the dispatchers")
    for action in (add, listing):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def run_add(args: argparse.Namespace) -> int:
    token = add_token(args.file, args.name, args.role, _classes(args.classes))
    print(json.dumps({"name": args.name, "role": args.role, "token": token}) if args.json else token)
    return 0


def run_list(args: argparse.Namespace) -> int:
    tokens = read_tokens(args.file).values()
    if args.json:
        rows = [{"name": one.name, "role": one.role, "classes": sorted(one.classes)} for one in tokens]
        print(json.dumps({"tokens": rows}))
    for token in () if args.json else tokens:
        classes = "" if token.classes == ALL_CLASSES else f"  {','.join(sorted(token.classes))}"
        print(f"{token.name}  {token.role}{classes}")
    return 0


def run_remove(args: argparse.Namespace) -> int:
    tokens = read_tokens(args.file)
    if args.name not in tokens:
        raise NotFound(f"{args.file} has no token of the name {args.name}")
    write_tokens(args.file, (token for token in tokens.values() if token.name != args.name))
    return 0


def _classes(given: str | None) -> frozenset[PriorityClass]:
    names = frozenset((given or ",".join(ALL_CLASSES)).split(","))
    if not names <= ALL_CLASSES:
        raise InvalidRequest("classes", f"are some of {', '.join(PriorityClass)}, got {given}")
    return frozenset(map(PriorityClass, names))


def add_token(file: Path, name: str, role: TokenRole, classes: frozenset[PriorityClass] = ALL_CLASSES) -> str:
    """Create a token, add its hash to the file and return it.

    Raises:
        InvalidRequest: the name is invalid or taken.
        ConfigError: the file cannot be read or written.
    """
    if not (0 < len(name) <= _MAX_NAME_CHARS and name.isprintable() and not name.startswith("#") and " " not in name):
        raise InvalidRequest("name", f"must be 1 to {_MAX_NAME_CHARS} printable characters, none a space, got {name!r}")
    tokens = read_tokens(file) if file.exists() else {}
    if name in tokens:
        raise InvalidRequest("name", f"{name} has a token already; `ballast tokens remove` withdraws it")
    if not file.parent.is_dir():
        raise ConfigError(str(file.parent), "is not a folder")
    token = new_token()
    write_tokens(file, (*tokens.values(), Token(name, role, digest_of(token), classes)))
    return token
