"""Lines of input files: validation, the request for a line, and the format of its result."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NoReturn, cast

from services.jobs.core.batch import BatchState, Problem

URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_MAX_PROBLEMS: Final = 20  # limit per file
_MAX_CUSTOM_ID: Final = 512
_UNRUN: Final = {
    BatchState.EXPIRED: ("batch_expired", "the batch expired before this line had an answer"),
    BatchState.CANCELLED: ("batch_cancelled", "the batch was cancelled before this line had an answer"),
}


@dataclass(frozen=True, slots=True)
class JobLine:
    """A line of an input file. `number`: counted from 1, including empty lines; `offset` and `length`: its position in
    bytes.
    """

    number: int
    custom_id: str
    offset: int
    length: int


class Checker:
    """Validates the lines of a file one by one. `lines`: the valid lines so far; `problems`: the first errors."""

    def __init__(self, url: str, *, max_lines: int, max_line_bytes: int) -> None:
        self.lines: list[JobLine] = []
        self.problems: list[Problem] = []
        self._url = url
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._seen: dict[str, int] = {}
        self._number = 0
        self._offset = 0

    def take(self, raw: bytes) -> bool:
        """Validate one line, passed with its line break. Returns False if the rest of the file need not be read."""
        self._number += 1
        offset, self._offset = self._offset, self._offset + len(raw)
        if len(raw) <= self._max_line_bytes and not raw.strip():
            return True
        try:
            self.lines.append(JobLine(self._number, self._check(raw), offset, len(raw)))
        except _Wrong as wrong:
            self.problems.append(Problem(wrong.code, wrong.why, wrong.param, self._number))
        if len(self.lines) > self._max_lines:
            why = f"the file has more than {self._max_lines} requests; split it into several batches"
            self.problems.append(Problem("too_many_requests", why, None, self._number))
            return False
        return len(self.problems) < _MAX_PROBLEMS

    def end(self) -> None:
        if not self.lines and not self.problems:
            self.problems.append(Problem("empty_file", "the input file has no requests"))

    def _check(self, raw: bytes) -> str:
        if len(raw) > self._max_line_bytes:
            raise _Wrong("line_too_large", f"the line has {len(raw)} bytes, at most {self._max_line_bytes} are allowed")
        given = parse(raw)
        custom_id = given.get("custom_id")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID or not _is_text(custom_id):
            why = f"must be a text of 1 to {_MAX_CUSTOM_ID} characters"
            raise _Wrong("invalid_custom_id", why, "custom_id")
        first = self._seen.setdefault(custom_id, self._number)
        if first != self._number:
            why = f"{custom_id!r} is also that of line {first}; each must be unique"
            raise _Wrong("duplicate_custom_id", why, "custom_id")
        if given.get("method") != "POST":
            raise _Wrong("invalid_method", f"must be POST, got {_shown(given.get('method'))}", "method")
        if given.get("url") != self._url:
            why = f"must be the batch's endpoint {self._url}, got {_shown(given.get('url'))}"
            raise _Wrong("invalid_url", why, "url")
        body = given.get("body")
        if not isinstance(body, dict):
            raise _Wrong("invalid_body", "must be an object", "body")
        if cast(dict[str, object], body).get("stream"):
            raise _Wrong("invalid_body", "batches are not streamed; leave it out", "body.stream")
        return custom_id


class _Wrong(Exception):
    def __init__(self, code: str, why: str, param: str | None = None) -> None:
        super().__init__(why)
        self.code, self.param = code, param
        self.why = why if param is None else f"{param}: {why}"


def parse(raw: bytes) -> dict[str, object]:
    """Parse a line as a JSON object. Raises _Wrong if it is no such object."""
    try:
        given: object = json.loads(raw.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _Wrong("invalid_json_line", f"is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise _Wrong("invalid_json_line", "is nested too deeply") from error
    except ValueError as error:
        raise _Wrong("invalid_json_line", f"is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise _Wrong("invalid_json_line", "must be an object")
    return cast(dict[str, object], given)


def request_of(raw: bytes, owner: str) -> bytes:
    """Return the body of the request for a line: the line's `body`, with the priority class batch and, if there is an
    owner, a `cache_salt` of its own. All lines are sent with the same token, so lines of different owners would share
    KV without it. A salt of the line separates it from the owner's other lines.
    """
    body = dict(cast(Mapping[str, object], parse(raw)["body"]))
    body.pop("service_tier", None)
    salt = body.get("cache_salt")
    if owner and (salt is None or isinstance(salt, str)):  # a gateway refuses any other type
        salted = f"{owner}\0{salt or ''}".encode(errors="surrogatepass")
        body["cache_salt"] = blake2b(salted, digest_size=16).hexdigest()
    body["priority"] = "batch"
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()  # about as long as the line
    except UnicodeEncodeError:  # an unpaired surrogate, which UTF-8 cannot express
        return json.dumps(body).encode()


def answered(line_id: str, custom_id: str, status: int, request_id: str, body: object) -> str:
    """Return the result of a line that a gateway has answered, with any status, as a line of JSON."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _dumps({"id": line_id, "custom_id": custom_id, "response": response, "error": None})


def unanswered(line_id: str, custom_id: str, code: str, message: str) -> str:
    error = {"code": code, "message": message}
    return _dumps({"id": line_id, "custom_id": custom_id, "response": None, "error": error})


def unrun(line_id: str, custom_id: str, outcome: BatchState) -> str:
    """Return the result of a line that had no answer when its batch ended."""
    return unanswered(line_id, custom_id, *_UNRUN[outcome])


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_text(text: str) -> bool:
    """False if the text contains unpaired surrogates, which JSON can express but UTF-8 cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")
