"""The `ballast` command. Exit status: 0 done, 1 failed, 2 asked for wrongly, 130 interrupted; never a traceback."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

import ballast
from ballast.bench import command as bench
from ballast.cli import chat, doctor, drain, generate, health, layouts, profile, sim, status, top, up
from ballast.common.errors import BallastError, ConfigError, InvalidRequest, Overloaded
from ballast.model import command as model

_FAILED, _WRONG, _INTERRUPTED = 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ballast",
        description="LLM serving that does not queue when the KV cache overflows.",
        epilog="The address of a running cluster is --address, or BALLAST_ADDRESS, or 127.0.0.1:50051.",
    )
    parser.add_argument("--version", action="version", version=f"ballast {ballast.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (up, generate, chat, status, top, drain, layouts, bench, profile, sim, model, doctor, health):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
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
