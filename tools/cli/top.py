"""`ballast top`: the status page with rates of generated tokens and KV demand over time, refreshed."""

import argparse
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ballast.client import Client, ClusterStatus
from ballast.common.errors import BallastError, InvalidRequest
from ballast.common.load import LoadReport
from tools.cli.arguments import Commands, add_address, add_json
from tools.cli.history import DemandHistory
from tools.cli.looks import query_dispatchers
from tools.cli.output import print_json
from tools.cli.render import render_status


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("top", help="show the status live; Ctrl-C ends")
    parser.set_defaults(run=run)
    parser.add_argument(
        "--interval-s", type=float, default=1.0, metavar="S", help="seconds between two refreshes (default: 1)"
    )
    add_json(parser)
    parser.add_argument("--once", action="store_true", help="print one page, with rates over one interval, and exit")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    if not 0.05 <= args.interval_s <= 3600:
        raise InvalidRequest("--interval-s", f"must be between 0.05 and 3600, got {args.interval_s:g}")
    if args.json and not args.once:
        raise InvalidRequest("--json", "is for --once: one page, one object")
    console = Console()
    with Client(args.address) as client:
        look = TopLook(client)
        page = look()
        if args.once:
            time.sleep(args.interval_s)
            if args.json:
                print_json(look.facts())
            else:
                console.print(look())
            return 0
        if not console.is_terminal:
            while True:
                console.print(page)
                time.sleep(args.interval_s)
                page = look()
        try:
            with Live(page, console=console, screen=console.is_terminal, auto_refresh=False) as live:
                while True:
                    time.sleep(args.interval_s)
                    try:
                        page = look()
                    except BallastError as error:  # may be temporary, so keep the last page and show the error
                        live.update(Group(page, Text(f"\n{error}", style="bold red")), refresh=True)
                    else:
                        live.update(page, refresh=True)
        except KeyboardInterrupt:
            return 0


class TopLook:
    """Takes a snapshot at each call, and renders it with the history and with rates since the last snapshot."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rates = Rates()
        self._harvest = Rates(lambda load: load.offline_tokens_total)
        self._history = DemandHistory()

    def facts(self) -> dict[str, object]:
        """A snapshot with the rates of generated tokens, for JSON output."""
        look = query_dispatchers(self._client)
        rates = self._rates.update(look.status, time.monotonic())
        return {"status": look.status, "dispatchers": look.dispatchers, "tokens_per_s": rates}

    def __call__(self) -> RenderableType:
        look = query_dispatchers(self._client)
        self._history.add(look.status)
        at_s = time.monotonic()
        harvest = self._harvest.update(look.status, at_s)
        return render_status(look, self._rates.update(look.status, at_s), self._history, harvest)


class Rates:
    """Tokens per second of each worker between two refreshes. A worker that has restarted in between has no rate."""

    def __init__(self, total: Callable[[LoadReport], int] = lambda load: load.generation_tokens_total) -> None:
        """`total`: the counter of a load report to use; default: tokens of online answers."""
        self._total = total
        self._before: dict[tuple[str, int], int] = {}  # (worker, incarnation) -> tokens
        self._at_s = 0.0

    def update(self, status: ClusterStatus, at_s: float) -> dict[str, float]:
        now = {(w.worker_id, w.incarnation): self._total(w.load) for w in status.workers if w.load}
        elapsed_s = at_s - self._at_s
        rates = {
            worker_id: (tokens - self._before[worker_id, incarnation]) / elapsed_s
            for (worker_id, incarnation), tokens in now.items()
            if (worker_id, incarnation) in self._before and elapsed_s > 0
        }
        self._before, self._at_s = now, at_s
        return rates
