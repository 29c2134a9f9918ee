"""`ballast batch`: submits files of requests that need no immediate answer to a gateway whose cluster has the jobs
service. It also fetches the results (docs/batches.md).
"""

import argparse
import contextlib
import json
import os
import secrets
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Mapping
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from ballast.client.access import Access
from ballast.common.arguments import output_file
from ballast.common.credentials import CA_FILE
from ballast.common.errors import (
    BallastError,
    CallFailed,
    ConfigError,
    InvalidRequest,
    NotFound,
    NotPossible,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from tools.cli.access import add_access
from tools.cli.arguments import Commands, add_json
from tools.cli.output import print_json

_URL: Final = "http://127.0.0.1:8000/v1"
_TIMEOUT_S: Final = 60.0
_LOOK_S: Final = 1.0
_PATIENCE_S: Final = 300.0  # how long to retry while services restart
_PIECE_BYTES: Final = 1 << 20
_STDOUT: Final = Path("-")
_ENDED: Final = ("completed", "failed", "expired", "cancelled")

Json = Mapping[str, Any]  # Any: JSON as received


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "batch",
        help="submit batches of requests, show their progress, fetch results",
        description="Runs the requests of a file with lower priority than online requests. The cluster needs a jobs"
        " service: `ballast up --jobs DIR`.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    submit = actions.add_parser("submit", help="upload a file of requests, start a batch and print its id")
    submit.set_defaults(run=run_submit)
    submit.add_argument(
        "file", type=Path, metavar="FILE", help="input file in OpenAI's batch format, one JSON object per line"
    )
    submit.add_argument(
        "--window", default="24h", metavar="TIME", help="completion window: 30m, 24h, 7d; open requests then expire"
    )
    submit.add_argument(
        "--wait", action="store_true", help="show progress until the batch has ended; Ctrl-C does not cancel it"
    )
    submit.add_argument("--out", type=output_file, metavar="FILE", help="with --wait: file for the results; -: stdout")

    listing = actions.add_parser("list", help="list the newest batches")
    listing.set_defaults(run=run_list)

    status = actions.add_parser("status", help="show the progress of a batch")
    status.set_defaults(run=run_status)
    status.add_argument("--wait", action="store_true", help="show progress until the batch has ended")

    results = actions.add_parser("results", help="write the results and errors, one JSON object per line")
    results.set_defaults(run=run_results)
    results.add_argument(
        "--out", type=output_file, default=_STDOUT, metavar="FILE", help="output file (default: stdout)"
    )

    cancel = actions.add_parser("cancel", help="cancel a batch; existing results are kept")
    cancel.set_defaults(run=run_cancel)
    for action in (status, results, cancel):
        action.add_argument("id", metavar="ID", help="id of the batch")
    for action in (submit, listing, status, results, cancel):
        url = os.environ.get("OPENAI_BASE_URL", _URL)
        action.add_argument("--url", default=url, help=f"URL of a gateway (OPENAI_BASE_URL; default: {_URL})")
        add_access(action)
    for action in (submit, listing, status, cancel):
        add_json(action)


def run_submit(args: argparse.Namespace) -> int:
    if args.out is not None and not args.wait:
        raise InvalidRequest("--out", "is for --wait; `ballast batch results` fetches results later")
    gateway = Gateway(args.url)
    if args.file.exists() and not args.file.is_file():
        raise InvalidRequest(str(args.file), "must be a regular file, because its size is sent first")
    with args.file.open("rb") as file:
        endpoint = _endpoint_of(file, args.file)
        uploaded = gateway.upload(file, args.file.name)
    wanted = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": args.window}
    batch = gateway.ask("POST", "/batches", wanted)
    if args.wait:
        if not args.json:
            print(batch["id"], flush=True)
        batch = _wait(gateway, batch["id"])
    code = _show(batch, args.json, short=not args.wait)
    if args.wait and args.out is not None:
        _write_results(gateway, batch, args.out)
    return code


def run_list(args: argparse.Namespace) -> int:
    listed = cast("list[Json]", Gateway(args.url).ask("GET", "/batches?limit=100")["data"])
    if args.json:
        print_json({"batches": listed})
    for batch in () if args.json else listed:
        print(_line(batch))
    return 0


def run_status(args: argparse.Namespace) -> int:
    gateway = Gateway(args.url)
    batch = _wait(gateway, args.id) if args.wait else gateway.batch(args.id)
    return _show(batch, args.json)


def run_results(args: argparse.Namespace) -> int:
    gateway = Gateway(args.url)
    batch = gateway.batch(args.id)
    if batch["status"] not in _ENDED:
        raise NotPossible(f"batch {args.id} is {batch['status']}: its results are available once it has ended")
    _write_results(gateway, batch, args.out)
    if batch["status"] == "completed":
        return 0
    print(_line(batch), file=sys.stderr)
    return 1


def run_cancel(args: argparse.Namespace) -> int:
    _show(Gateway(args.url).ask("POST", f"/batches/{_quoted(args.id)}/cancel", {}), args.json)
    return 0


def _endpoint_of(file: BinaryIO, path: Path) -> str:
    """The endpoint (`url`) of the first request in a file; all others must have the same. Rewinds the file.

    Raises:
        InvalidRequest: the first line is invalid, or the file has no requests.
    """
    for number, raw in enumerate(file, start=1):
        if raw.strip():
            try:
                url = json.loads(raw)["url"]
            except (ValueError, KeyError, TypeError) as error:
                why = 'must be a JSON object with "custom_id", "method", "url" and "body"'
                raise InvalidRequest(f"{path}:{number}", why) from error
            file.seek(0)
            return str(url)
    raise InvalidRequest(str(path), "has no requests")


def _wait(gateway: "Gateway", batch_id: str) -> Json:
    """Wait until a batch has ended and return it. Progress is printed to standard error."""
    began_s, began_count, shown = time.monotonic(), None, ""
    on_terminal = sys.stderr.isatty()
    while True:
        batch = gateway.patiently("GET", f"/batches/{_quoted(batch_id)}")
        counts = batch["request_counts"]
        done = int(counts["completed"]) + int(counts["failed"])
        began_count = done if began_count is None else began_count
        text = _line(batch)
        rate = (done - began_count) / max(time.monotonic() - began_s, 1e-9)
        if batch["status"] == "in_progress" and rate > 0:
            text += f", {rate:.1f}/s, about {_duration((int(counts['total']) - done) / rate)} left"
        if on_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif text != shown:
            print(text, file=sys.stderr, flush=True)
        shown = text
        if batch["status"] in _ENDED:
            if on_terminal:
                print(file=sys.stderr)
            return batch
        time.sleep(_LOOK_S)


def _show(batch: Json, as_json: bool, *, short: bool = False) -> int:
    """Print a batch. Returns the exit status: 0 if it has completed or still runs, 1 if it has ended in any other
    way.
    """
    if as_json:
        print_json(batch)
    else:
        print(batch["id"] if short else _line(batch))
        for problem in cast(Json, batch.get("errors") or {}).get("data", ()):
            where = "" if problem["line"] is None else f"line {problem['line']}: "
            print(f"  {where}{problem['message']}", file=sys.stderr)
    return int(batch["status"] in _ENDED and batch["status"] != "completed")


def _line(batch: Json) -> str:
    counts = batch["request_counts"]
    done = int(counts["completed"]) + int(counts["failed"])
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{batch['id']}  {batch['status']}  {done} of {counts['total']}{failed}"


def _write_results(gateway: "Gateway", batch: Json, path: Path) -> None:
    with contextlib.nullcontext(sys.stdout.buffer) if path == _STDOUT else path.open("wb") as out:
        for name in ("output_file_id", "error_file_id"):
            if batch.get(name):
                for piece in gateway.download(str(batch[name])):
                    out.write(piece)
        out.flush()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes > 2 else f"{60 * minutes + rest} s"


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="")


class Gateway:
    """HTTP client of a gateway."""

    def __init__(self, url: str) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise InvalidRequest("--url", f"must be http://HOST:PORT/v1, got {url}")
        self._url = url.rstrip("/")
        ca_file = os.environ.get(CA_FILE) or None
        try:
            self._tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            raise ConfigError(str(ca_file), f"cannot be read: {error.strerror}") from error

    def batch(self, batch_id: str) -> Json:
        return self.ask("GET", f"/batches/{_quoted(batch_id)}")

    def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """Send one request and return the JSON of its response.

        Raises:
            BallastError: the gateway cannot be reached or reports an error; the subclass corresponds to its status.
        """
        data = None if body is None else json.dumps(body).encode()
        with self._open(method, path, data, {"Content-Type": "application/json"}) as answer:
            return _object_in(answer)

    def patiently(self, method: str, path: str) -> Json:
        """Like `ask`, but retry for up to five minutes while services are unavailable or overloaded."""
        give_up_at_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self.ask(method, path)
            except (Unavailable, Overloaded):
                if time.monotonic() > give_up_at_s:
                    raise
            time.sleep(_LOOK_S)

    def upload(self, file: BinaryIO, name: str) -> Json:
        boundary = secrets.token_hex(16)
        safe = name.replace("\\", "_").replace('"', "_").replace("\n", "_").replace("\r", "_")
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{safe}"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        ).encode(errors="replace")  # a file name need not be UTF-8
        tail = f"\r\n--{boundary}--\r\n".encode()
        length = len(head) + os.fstat(file.fileno()).st_size + len(tail)

        def pieces() -> Generator[bytes]:
            yield head
            while piece := file.read(_PIECE_BYTES):
                yield piece
            yield tail

        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(length)}
        with self._open("POST", "/files", pieces(), headers) as answer:
            return _object_in(answer)

    def download(self, file_id: str) -> Generator[bytes]:
        with self._open("GET", f"/files/{_quoted(file_id)}/content", None, {}) as answer:
            while piece := answer.read(_PIECE_BYTES):
                yield piece
            if answer.length:
                raise IncompleteRead(b"", answer.length)

    @contextlib.contextmanager
    def _open(  # Any: urllib accepts bytes, or an iterable of bytes
        self, method: str, path: str, data: Any, headers: Mapping[str, str]
    ) -> Generator[HTTPResponse]:
        """Send a request and yield the response. Errors while the response is read are reported, too."""
        request = urllib.request.Request(self._url + path, data, dict(headers), method=method)
        if token := Access.of().token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self._tls) as answer:
                yield cast(HTTPResponse, answer)
        except urllib.error.HTTPError as error:
            raise _error_of(error.code, error.read(1 << 20)) from error
        except urllib.error.URLError as error:
            raise Unavailable(self._url, str(error.reason)) from error
        except (OSError, HTTPException) as error:
            raise Unavailable(self._url, f"the connection was lost: {error}") from error


def _object_in(answer: HTTPResponse) -> Json:
    try:
        found: object = json.load(answer)
    except ValueError as error:
        raise CallFailed(f"{answer.url} did not answer with JSON; is it a gateway's URL, with /v1?") from error
    return cast(Json, found)


def _error_of(status: int, body: bytes) -> BallastError:
    try:
        said = json.loads(body)["error"]
        why, param = str(said["message"]), str(said["param"] or "batch")
    except (ValueError, KeyError, TypeError):
        why, param = body[:300].decode(errors="replace"), "batch"
    match status:
        case 400 | 413 | 422:
            return InvalidRequest(param, why.removeprefix(f"{param}: "))
        case 401:
            return Unauthenticated(why)
        case 403:
            return PermissionDenied(why)
        case 404:
            return NotFound(why)
        case 409:
            return NotPossible(why)
        case 429 | 502 | 503 | 507:
            return Overloaded(why, 1.0)
        case _:
            return CallFailed(f"status {status}: {why}")
