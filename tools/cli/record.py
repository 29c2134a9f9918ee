"""`ballast record`: records a running cluster's requests as a trace for `ballast size` and `ballast sim`. The trace has
arrivals and lengths, but no prompts or names.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ballast.client import Client, EndedRequest
from ballast.common.arguments import output_file, seconds
from ballast.common.errors import DeadlineExceeded, Unavailable
from ballast.common.units import counted
from tools.cli.arguments import Commands, add_address

_POLL_S = 1.0
_LINGER_S = 600.0  # how long to wait after the recording for its last requests to end
_MOST_ROWS = 1_000_000
_TELL_S = 30.0


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "record",
        help="record arrivals and lengths of requests as a trace",
        description="Records arrival_s,input_tokens,output_tokens,class of the requests that arrive from now on, in the"
        " order of arrival, as a trace for `ballast size` and `ballast sim`. Ends when these requests have ended, at"
        f" most {_LINGER_S:.0f} s after the recording time, or with Ctrl-C, which writes the requests recorded so far."
        " Requests without a token, such as refused ones, are not recorded.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--for", dest="for_s", type=seconds, default=3600.0, metavar="TIME", help="10m, 1h (1h)")
    parser.add_argument("--out", type=output_file, metavar="FILE", help="output file (default: standard output)")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    with Client(args.address) as client:
        recording = Recording(began_unix_s=time.time(), until_unix_s=time.time() + args.for_s)
        with suppress(KeyboardInterrupt):
            _record(client, recording)
    if recording.lost_count:
        lost = counted(recording.lost_count, "request")
        print(f"{lost} ended faster than they could be asked for, and are not in the trace", file=sys.stderr)
    for address in recording.silent:
        print(f"{address} does not answer, and its latest requests are not in the trace", file=sys.stderr)
    text = "".join(line + "\n" for line in recording.lines())
    if args.out is None or str(args.out) == "-":
        sys.stdout.write(text)
    else:
        args.out.write_text(text, encoding="utf-8")
    print(
        f"recorded {counted(len(recording.rows), 'request')}; those without a token (refused ones ...) are left out",
        file=sys.stderr,
    )
    return 1 if recording.silent else 0


@dataclass(slots=True)
class Recording:
    """The ended requests that arrived during a recording, from all dispatchers. `lost_count`: number of requests that
    dispatchers have forgotten, or that exceed the limit. `silent`: dispatchers that did not answer the latest poll.
    """

    began_unix_s: float
    until_unix_s: float
    rows: list[EndedRequest] = field(default_factory=list[EndedRequest])
    lost_count: int = 0
    silent: list[str] = field(default_factory=list[str])

    def take(self, requests: Iterable[EndedRequest], forgotten_count: int) -> None:
        self.lost_count += forgotten_count
        for request in requests:
            if not self.began_unix_s <= request.arrived_unix_s <= self.until_unix_s:
                continue
            if len(self.rows) < _MOST_ROWS:
                self.rows.append(request)
            else:
                self.lost_count += 1

    def lines(self) -> Iterable[str]:
        yield "arrival_s,input_tokens,output_tokens,class"
        for row in sorted(self.rows, key=lambda row: row.arrived_unix_s):
            at_s = row.arrived_unix_s - self.began_unix_s
            yield f"{at_s:.3f},{row.prompt_token_count},{row.completion_token_count},{row.priority}"


def _record(client: Client, recording: Recording) -> None:
    """Poll every dispatcher once a second until the recording is over and its requests have ended. Dispatchers that do
    not answer are polled again.
    """
    lasts: dict[str, int | None] = dict.fromkeys(client.addresses)
    told_at_s = time.monotonic()
    while True:
        open_s, silent = list[float](), list[str]()
        for address, last in lasts.items():
            try:
                answer = client.ended_requests(address, last)
                if last is not None and answer.last < last:  # a restarted dispatcher counts from 0 again
                    answer = client.ended_requests(address, 0)
            except (Unavailable, DeadlineExceeded):
                if len(lasts) == 1 and last is None:
                    raise
                silent.append(address)
                continue
            recording.take(answer.requests, answer.forgotten_count)
            lasts[address] = answer.last
            if answer.oldest_open_unix_s is not None:
                open_s.append(answer.oldest_open_unix_s)
        recording.silent, now_s = silent, time.time()
        over = now_s >= recording.until_unix_s
        ended = not silent and min(open_s, default=now_s) > recording.until_unix_s
        if over and (ended or now_s > recording.until_unix_s + _LINGER_S):
            return
        if time.monotonic() - told_at_s >= _TELL_S:
            told_at_s = time.monotonic()
            print(f"{counted(len(recording.rows), 'request')} so far", file=sys.stderr, flush=True)
        time.sleep(min(_POLL_S, max(0.05, recording.until_unix_s - now_s)) if not over else _POLL_S)
