"""The HTTP side of the jobs service: OpenAI's Files and Batches. A standby forwards requests to the leader."""

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ballast.common.errors import BallastError, NotFound, NotPossible, Unavailable
from ballast.common.sampling import PriorityClass
from ballast.service.failures import Failure, invalid
from ballast.service.http_client import BrokenCall, HttpClient
from ballast.service.http_forward import ClientGone, forward
from ballast.service.logs import get_logger
from ballast.service.tokens import TokenBook
from services.jobs.core.batch import BatchState, JobBatch
from services.jobs.core.lines import URLS
from services.jobs.runner import Runner
from services.jobs.store import CallerUsage, Fenced, Full, StoredFile
from services.jobs.uploads import FileForm

_FORWARDED: Final = "x-ballast-forwarded"
_PIECE_TIMEOUT_S: Final = 60.0
_MAX_JSON_BYTES: Final = 64 << 10
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512  # OpenAI's limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    max_file_bytes: int
    max_bytes: int
    max_key_bytes: int
    max_key_batches: int
    max_key_lines: int
    max_window_s: float


class Desk:
    """The handlers of the API. While this replica is the leader, `runner` is set; otherwise requests are forwarded to
    `leader()`. `book`: tokens of clients; None: clients need no token.
    """

    def __init__(self, quotas: Quotas, book: TokenBook | None) -> None:
        self.runner: Runner | None = None
        self.leader: Callable[[], HttpClient | None] = lambda: None
        self._quotas = quotas
        self._book = book

    # ------------------------------------------------------------------------------------------ files

    async def upload(self, request: Request, runner: Runner, owner: str) -> Response:
        file_id, now_s = f"file-{secrets.token_hex(12)}", runner.now_s()
        self._check_bytes(await runner.stored(runner.store.usage), await runner.stored(runner.store.usage, owner), 0)
        form = FileForm(
            request.headers.get("content-type", ""),
            self._quotas.max_file_bytes,
            lambda name: runner.store.new_file(file_id, owner, "batch", name or "file.jsonl", now_s),
        )
        try:
            pieces = request.stream()
            while (piece := await _next(pieces)) is not None:
                await asyncio.to_thread(form.feed, piece)
            upload = form.end()
            _check_upload(form.fields)
            everything = await runner.stored(runner.store.usage)
            self._check_bytes(everything, await runner.stored(runner.store.usage, owner), upload.bytes)
            file = await asyncio.to_thread(upload.commit)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(form.abort))
            raise
        await runner.stored(runner.store.add_file, file)  # removes the file itself if it fails
        return JSONResponse(_file_object(file))

    def _check_bytes(self, everything: CallerUsage, own: CallerUsage, added: int) -> None:
        if everything.file_bytes + added > self._quotas.max_bytes:
            why = f"all files together may have {self._quotas.max_bytes} bytes; delete some"
            raise Failure(507, "server_error", "store_full", why)
        if own.file_bytes + added > self._quotas.max_key_bytes:
            raise _too_much(f"your files may have {self._quotas.max_key_bytes} bytes together; delete some")

    async def list_files(self, request: Request, runner: Runner, owner: str) -> Response:
        query = request.query_params
        limit = _limit(query.get("limit"), 10_000, 10_000)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", "must be asc or desc")
        found = await runner.stored(
            runner.store.files,
            owner,
            purpose=query.get("purpose"),
            after=query.get("after"),
            limit=limit + 1,
            newest_first=order == "desc",
        )
        return _page([_file_object(one) for one in found], limit)

    async def show_file(self, request: Request, runner: Runner, owner: str) -> Response:
        return JSONResponse(_file_object(await runner.stored(runner.store.file, request.path_params["id"], owner)))

    async def download(self, request: Request, runner: Runner, owner: str) -> Response:
        file = await runner.stored(runner.store.file, request.path_params["id"], owner)
        path = runner.store.path(file.id)
        if not await asyncio.to_thread(path.exists):
            raise NotFound(f"file {file.id} is being deleted")
        return FileResponse(path, media_type="application/octet-stream")

    async def delete_file(self, request: Request, runner: Runner, owner: str) -> Response:
        file = await runner.stored(runner.store.file, request.path_params["id"], owner)
        if await runner.stored(runner.store.is_in_use, file.id):
            raise NotPossible(f"file {file.id} is the input of a batch that has not ended; cancel that first")
        await runner.stored(runner.store.delete_file, file.id)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    # ------------------------------------------------------------------------------------------ batches

    async def create(self, request: Request, runner: Runner, owner: str) -> Response:
        given = await _json(request)
        url, file_id = given.get("endpoint"), given.get("input_file_id")
        if url not in URLS:
            raise invalid("endpoint", f"must be one of {', '.join(URLS)}, got {url!r}")
        if not isinstance(file_id, str):
            raise invalid("input_file_id", "must be the id of a file with purpose batch")
        unknown = sorted(set(given) - {"endpoint", "input_file_id", "completion_window", "metadata"})
        if unknown:
            raise invalid(unknown[0], "does not exist", code="unknown_parameter")
        window, window_s = self._window(given.get("completion_window"))
        metadata = _metadata(given.get("metadata"))
        try:
            await runner.stored(runner.store.file, file_id, owner)
        except NotFound as error:
            raise invalid("input_file_id", str(error)) from error
        own = await runner.stored(runner.store.usage, owner)
        if own.open_batches >= self._quotas.max_key_batches:
            raise _too_much(f"{own.open_batches} of your batches are open, which is the limit; wait for one to end")
        if own.open_lines >= self._quotas.max_key_lines:
            raise _too_much(f"{own.open_lines} lines of your batches have no result, over the limit; wait for some")
        now_s = runner.now_s()
        batch = JobBatch(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            url=str(url),
            input_file_id=file_id,
            window=window,
            created_s=now_s,
            expires_s=now_s + window_s,
            metadata=metadata,
        )
        await runner.add(batch)
        return JSONResponse(_batch_object(batch))

    def _window(self, given: object) -> tuple[str, float]:
        found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", given) if isinstance(given, str) else None
        if found is None:
            raise invalid("completion_window", f"must be a time such as 24h, 30m or 7d, got {given!r}")
        window_s = float(found[1]) * _UNITS_S[found[2]]
        if window_s > self._quotas.max_window_s:
            raise invalid("completion_window", f"may be {self._quotas.max_window_s:g} s at most here, got {given!r}")
        return found[0], window_s

    async def list_batches(self, request: Request, runner: Runner, owner: str) -> Response:
        limit = _limit(request.query_params.get("limit"), 20, 100)
        after = request.query_params.get("after")
        found = await runner.stored(runner.store.batches, owner, after=after, limit=limit + 1)
        return _page([_batch_object(one) for one in found], limit)

    async def show_batch(self, request: Request, runner: Runner, owner: str) -> Response:
        return JSONResponse(_batch_object(await runner.stored(runner.store.batch, request.path_params["id"], owner)))

    async def cancel(self, request: Request, runner: Runner, owner: str) -> Response:
        return JSONResponse(_batch_object(await runner.cancel(request.path_params["id"], owner)))

    # ------------------------------------------------------------------------------------------ all else

    async def health(self, _: Request) -> Response:
        runner = self.runner
        if runner is None:
            return JSONResponse({"status": "standby"}, 200 if self.leader() is not None else 503)
        if runner.is_full:
            return JSONResponse({"status": "full", "why": "the disk is full; results wait in memory"}, 507)
        return JSONResponse({"status": "ok"})

    async def live(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    def owner_of(self, request: Request, *, for_new: bool) -> str:
        """Name of the caller's token; "" if tokens are not required. `for_new`: the request makes a batch or a file,
        for which the token must permit the class batch. Others are permitted, so that a token whose classes have
        changed can still fetch and delete what it has.

        Raises:
            Failure: tokens are required, and the caller has no valid one, or none for the class batch.
        """
        if self._book is None:
            return ""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        token = self._book.find(given.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            why = "a valid token is needed, as Authorization: Bearer TOKEN (the API key of OpenAI's clients)"
            raise Failure(401, "invalid_request_error", "invalid_api_key", why, headers={"www-authenticate": "Bearer"})
        if for_new and PriorityClass.BATCH not in token.classes:
            why = f"the token {token.name} may use the classes {', '.join(sorted(token.classes))}, but not batch"
            raise Failure(403, "invalid_request_error", "permission_denied", why)
        return token.name


Handler = Callable[[Request, Runner, str], Awaitable[Response]]


def build_app(desk: Desk) -> Starlette:
    served: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/files", desk.upload),
        ("GET", "/v1/files", desk.list_files),
        ("GET", "/v1/files/{id}", desk.show_file),
        ("DELETE", "/v1/files/{id}", desk.delete_file),
        ("GET", "/v1/files/{id}/content", desk.download),
        ("POST", "/v1/batches", desk.create),
        ("GET", "/v1/batches", desk.list_batches),
        ("GET", "/v1/batches/{id}", desk.show_batch),
        ("POST", "/v1/batches/{id}/cancel", desk.cancel),
    ]
    routes = [Route(path, _JobsEndpoint(desk, act), methods=[method]) for method, path, act in served]
    routes += [Route("/health", desk.health), Route("/live", desk.live)]

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        why = f"{error.detail}: {request.method} {request.url.path}"
        code = "unknown_url" if error.status_code == 404 else "method_not_allowed"
        return _refusal(Failure(error.status_code, "invalid_request_error", code, why))

    return Starlette(routes=routes, exception_handlers={HTTPException: on_http_error})


class _JobsEndpoint:
    """The endpoint of a route. This replica handles its requests if it is the leader, or else forwards them to the
    leader. Every failure becomes a response.
    """

    def __init__(self, desk: Desk, act: Handler) -> None:
        self._desk = desk
        self._act = act

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp
        request = Request(scope, receive)
        try:
            runner = self._desk.runner
            if runner is None:
                return await self._hand_on(request, scope, receive, send)
            owner = self._desk.owner_of(request, for_new=self._act in (self._desk.create, self._desk.upload))
            answer = await self._act(request, runner, owner)
        except (ClientGone, ClientDisconnect):
            return None
        except Exception as error:  # noqa: BLE001 - every failure becomes a response here
            answer = _refusal(_failure_of(error))
        return await answer(scope, receive, send)

    async def _hand_on(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        leader = self._desk.leader()
        if leader is None or _FORWARDED in request.headers:
            raise Unavailable("jobs", "no replica of the jobs service is active at the moment")
        await forward(leader, scope, receive, send, {_FORWARDED: "1"})


def _failure_of(error: Exception) -> Failure:
    match error:
        case Failure():
            return error
        case NotFound():
            return Failure(404, "invalid_request_error", "not_found", str(error))
        case NotPossible():
            return Failure(409, "invalid_request_error", "not_possible", str(error))
        case Full():
            return Failure(507, "server_error", "store_full", str(error))
        case Unavailable() | Fenced() | BrokenCall():
            return Failure(503, "server_error", "unavailable", str(error), headers={"retry-after": "1"})
        case BallastError():
            return Failure(500, "server_error", "internal_error", str(error))
        case _:
            get_logger().error("request failed", exc_info=error)
            return Failure(500, "server_error", "internal_error", "the jobs service failed; see its log")


def _refusal(failure: Failure) -> Response:
    return JSONResponse(failure.body(), failure.status, dict(failure.headers))


def _too_much(why: str) -> Failure:
    return Failure(429, "insufficient_quota", "quota_exceeded", why, headers={"retry-after": "60"})


async def _next(pieces: Any) -> bytes | None:  # Any: Starlette's type of streams
    try:
        async with asyncio.timeout(_PIECE_TIMEOUT_S):
            return await anext(pieces, None)
    except TimeoutError as error:
        why = f"no more of the body arrived within {_PIECE_TIMEOUT_S:g} s"
        raise Failure(408, "invalid_request_error", "body_timeout", why) from error


async def _json(request: Request) -> Mapping[str, object]:
    body = bytearray()
    pieces = request.stream()
    while (piece := await _next(pieces)) is not None:
        body += piece
        if len(body) > _MAX_JSON_BYTES:
            raise invalid(None, f"the body has more than {_MAX_JSON_BYTES} bytes", code="body_too_large", status=413)
    try:
        given: object = json.loads(bytes(body))
        json.dumps(given, ensure_ascii=False).encode()  # fails for unpaired surrogates, which no answer can contain
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise invalid(None, "the body must be a JSON object")
    return cast(dict[str, object], given)


def _metadata(given: object) -> dict[str, str]:
    if given is None:
        return {}
    pairs = cast(dict[str, object], given).items() if isinstance(given, dict) else ()
    is_fine = isinstance(given, dict) and len(pairs) <= _MAX_METADATA
    if not is_fine or not all(len(k) <= _MAX_KEY and isinstance(v, str) and len(v) <= _MAX_VALUE for k, v in pairs):
        raise invalid(
            "metadata",
            f"must be an object of up to {_MAX_METADATA} strings of up to {_MAX_VALUE} characters, "
            f"with keys of up to {_MAX_KEY}",
        )
    return {key: str(value) for key, value in pairs}


def _check_upload(fields: Mapping[str, str]) -> None:
    purpose = fields.get("purpose")
    if purpose != "batch":
        raise invalid("purpose", f"must be batch, got {purpose!r}")
    unknown = sorted(set(fields) - {"purpose"})
    if unknown:
        why = "does not exist (files are deleted by DELETE, or after --keep-s)"
        raise invalid(unknown[0], why, code="unknown_parameter")


def _limit(given: str | None, default: int, most: int) -> int:
    if given is None:
        return default
    if not given.isdecimal() or len(given) > len(str(most)) or not 1 <= int(given) <= most:
        raise invalid("limit", f"must be between 1 and {most}, got {given!r}")
    return int(given)


def _page(found: list[dict[str, object]], limit: int) -> Response:
    data = found[:limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": data, "has_more": len(found) > limit, **ends})


def _file_object(file: StoredFile) -> dict[str, object]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_s),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def _batch_object(batch: JobBatch) -> dict[str, object]:
    problems = [
        {"code": one.code, "message": one.message, "param": one.param, "line": one.line} for one in batch.problems
    ]
    times = {f"{state}_at": batch.at_s.get(state) for state in BatchState if state is not BatchState.VALIDATING}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.url,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.window,
        "status": str(batch.state),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_s),
        "expires_at": int(batch.expires_s),
        **{name: None if at_s is None else int(at_s) for name, at_s in times.items()},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": dict(batch.metadata),
    }
