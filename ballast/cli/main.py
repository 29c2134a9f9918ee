"""The `ballast` command. Exit status: 0 done, 1 failed, 2 asked for wrongly, 130 interrupted; never a traceback."""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import ballast
from ballast.cli.arguments import Commands
from ballast.common.errors import BallastError, ConfigError, InvalidRequest, Overloaded

_FAILED, _WRONG, _INTERRUPTED = 1, 2, 130
# Only the module of the command that is asked for is imported: all of them take a second.
_MODULES: dict[str, tuple[str, ...]] = {
    "ballast.cli.up": ("up", "serve"),
    "ballast.cli.generate": ("generate",),
    "ballast.cli.chat": ("chat",),
    "ballast.cli.status": ("status",),
    "ballast.cli.top": ("top",),
    "ballast.cli.why": ("why",),
    "ballast.cli.drain": ("drain",),
    "ballast.cli.chaos": ("chaos",),
    "ballast.cli.layouts": ("plan", "drop", "restore", "transitions"),
    "ballast.bench.command": ("bench",),
    "ballast.cli.profile": ("profile",),
    "ballast.cli.sim": ("sim",),
    "ballast.model.command": ("model",),
    "ballast.cli.doctor": ("doctor",),
    "ballast.cli.health": ("health",),
}


class _CommandModule(Protocol):
    def add_parser(self, subparsers: Commands, /) -> None: ...


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Of `command`; of all commands if there is none of this name."""
    parser = argparse.ArgumentParser(
        prog="ballast",
        description="LLM serving that does not queue when the KV cache overflows.",
        epilog="The address of a running cluster is --address, or BALLAST_ADDRESS, or 127.0.0.1:50051.",
    )
    parser.add_argument("--version", action="version", version=f"ballast {ballast.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = [name for name, made in _MODULES.items() if command in made] or list(_MODULES)
    for name in wanted:
        cast(_CommandModule, importlib.import_module(name)).add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    args = build_parser(given[0] if given else "").parse_args(given)
    try:
        return args.run(args)
    except BallastError as error:
        return _fail([error])
    except ExceptionGroup as group:
        known, bug = group.split(BallastError)
        if known is None or bug is not None:
            raise
        return _fail(list(_leaves(known)))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; there is nobody to complain to, not even when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED


def _fail(errors: Sequence[BallastError]) -> int:
    for error in errors:
        hint = f" (try again in {error.retry_after_s:.1f} s)" if isinstance(error, Overloaded) else ""
        print(f"ballast: {error}{hint}", file=sys.stderr)
    return _WRONG if all(isinstance(error, (ConfigError, InvalidRequest)) for error in errors) else _FAILED


def _leaves(group: BaseExceptionGroup[BallastError]) -> Iterator[BallastError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


if __name__ == "__main__":
    sys.exit(main())
