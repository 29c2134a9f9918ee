"""`ballast scale`: receives the planner's webhook and runs a command with the wanted number of instances."""

import argparse
import asyncio
from contextlib import suppress
from pathlib import Path

from ballast.common.addresses import is_address
from ballast.common.errors import ConfigError
from ballast.common.wanted import Wanted
from ballast.service.security import read_secret
from tools.cli.arguments import Commands
from tools.local.scaling import hearing

_PLACE = "{wanted}"
_AGAIN_S = 15.0  # pause before a failed command is run again
_ENDS_WITHIN_S = 1800.0  # a command that takes longer is stopped, because later numbers wait for its end
_STOPS_WITHIN_S = 10.0  # before it is killed


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "scale",
        help="start and stop workers with your own command, as the planner wants",
        description="Receives the webhook of planners (--scale-webhook) and runs the command, with the wanted number in"
        f" place of {_PLACE}: `ballast scale --secret-file FILE -- docker compose up -d --no-recreate --scale"
        f" worker={_PLACE}`. Runs one command at a time, then the latest number received meanwhile. A failed command is"
        f" run again after {_AGAIN_S:.0f} s, because planners send only changes. One that has not ended after"
        f" {_ENDS_WITHIN_S / 60:.0f} minutes is stopped.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--listen", default="127.0.0.1:9100", metavar="HOST:PORT", help="address to listen on (default: 127.0.0.1:9100)"
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="file with the webhook's secret, the same as for planners",
    )
    parser.add_argument("--least", type=int, default=1, metavar="N", help="minimum number of workers (default: 1)")
    parser.add_argument("--most", type=int, default=256, metavar="N", help="maximum number of workers (default: 256)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help=f"command after --, with {_PLACE}")


def run(args: argparse.Namespace) -> int:
    """Serve the webhook and run the command until interrupted.

    Raises:
        ConfigError: the address, a limit, the secret or the command is invalid.
    """
    host, _, port = args.listen.rpartition(":")
    if not (is_address(args.listen) or (host and port == "0")):
        raise ConfigError("--listen", f"must be HOST:PORT, got {args.listen!r}")
    if not any(_PLACE in word for word in args.command):
        raise ConfigError("COMMAND", f"has no {_PLACE}: it would always do the same")
    if not 0 <= args.least <= args.most:
        raise ConfigError("--least", f"must be between 0 and --most, got {args.least} and {args.most}")
    asyncio.run(_follow(args, host.strip("[]"), int(port), read_secret(args.secret_file)))
    return 0


async def _follow(args: argparse.Namespace, host: str, port: int, secret: bytes) -> None:
    told: asyncio.Queue[Wanted] = asyncio.Queue()
    try:
        async with hearing(secret, told.put_nowait, host, port) as url:
            print(f"listening at {url}", flush=True)
            wanted = await told.get()
            while True:
                while not told.empty():
                    wanted = told.get_nowait()
                is_done = await _carry_out(args, wanted)
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if is_done else _AGAIN_S):
                        wanted = await told.get()
    except OSError as error:
        raise ConfigError("--listen", f"{args.listen}: {error.strerror}") from error


async def _carry_out(args: argparse.Namespace, wanted: Wanted) -> bool:
    """Run the command. Returns True if it succeeded."""
    count = min(args.most, max(args.least, wanted.wanted))
    command = [word.replace(_PLACE, str(count)) for word in args.command]
    try:
        process = await asyncio.create_subprocess_exec(*command)
    except OSError as error:
        raise ConfigError("COMMAND", f"{command[0]}: {error.strerror}") from error
    ending = ""
    for within_s, stop in ((_ENDS_WITHIN_S, process.terminate), (_STOPS_WITHIN_S, process.kill)):
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await process.wait()
            break
        ending = f"; the command had not ended after {_ENDS_WITHIN_S:.0f} s and was stopped"
        stop()
    status = await process.wait()
    if status != 0 and not ending:
        ending = f"; the command ended with {status}"
    print(f"{count} wanted ({wanted.reason}){ending}", flush=True)
    return not ending
