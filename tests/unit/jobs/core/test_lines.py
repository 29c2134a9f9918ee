"""Input lines are parsed, and results have the right format."""

import json
from typing import Any

import pytest

from services.jobs.core.batch import BatchState
from services.jobs.core.lines import Checker, answered, request_of, unrun

URL = "/v1/chat/completions"


def line(**changes: Any) -> bytes:
    given = {"custom_id": "a", "method": "POST", "url": URL, "body": {"model": "m", "messages": []}, **changes}
    return json.dumps({key: value for key, value in given.items() if value is not ...}).encode() + b"\n"


def checked(*lines: bytes, max_lines: int = 10, max_line_bytes: int = 1000) -> Checker:
    checker = Checker(URL, max_lines=max_lines, max_line_bytes=max_line_bytes)
    for one in lines:
        if not checker.take(one):
            break
    checker.end()
    return checker


def test_lines_can_be_reread_at_their_offsets() -> None:
    raw = [line(custom_id="a"), b"\n", b"  \r\n", line(custom_id="é"), line(custom_id="c").rstrip()]
    checker = checked(*raw)
    assert checker.problems == []
    assert [one.number for one in checker.lines] == [1, 4, 5]
    whole = b"".join(raw)
    found = [json.loads(whole[one.offset : one.offset + one.length])["custom_id"] for one in checker.lines]
    assert found == ["a", "é", "c"] == [one.custom_id for one in checker.lines]


@pytest.mark.parametrize(
    ("raw", "code", "says"),
    [
        (b"{", "invalid_json_line", "not valid JSON"),
        (b"\xff\xfe", "invalid_json_line", "not UTF-8"),
        (b"[" * 100_000, "invalid_json_line", "nested"),
        (b"[1]", "invalid_json_line", "must be an object"),
        (line(body={"x": float("nan")}), "invalid_json_line", "NaN"),
        (line(custom_id=...), "invalid_custom_id", "1 to 512"),
        (line(custom_id=""), "invalid_custom_id", "1 to 512"),
        (line(custom_id="x" * 513), "invalid_custom_id", "1 to 512"),
        (line(custom_id=7), "invalid_custom_id", "1 to 512"),
        (line(custom_id="\ud800"), "invalid_custom_id", "1 to 512"),
        (line(method="GET"), "invalid_method", "must be POST"),
        (line(url="/v1/completions"), "invalid_url", "/v1/chat/completions, got"),
        (line(body="text"), "invalid_body", "must be an object"),
        (line(body={"stream": True}), "invalid_body", "not streamed"),
        (line(body={"text": "x" * 200_000}), "line_too_large", "at most 150000"),
    ],
)
def test_a_bad_line_is_named_with_its_number(raw: bytes, code: str, says: str) -> None:
    checker = checked(line(custom_id="first"), raw, max_line_bytes=150_000)
    [problem] = checker.problems
    assert (problem.code, problem.line) == (code, 2)
    assert says in problem.message


def test_ids_are_unique_and_lines_are_bounded() -> None:
    [twice] = checked(line(), line(custom_id="b"), line()).problems
    assert (twice.line, twice.message) == (3, "custom_id: 'a' is also that of line 1; each must be unique")
    [many] = checked(*(line(custom_id=str(i)) for i in range(5)), max_lines=3).problems
    assert (many.code, many.line) == ("too_many_requests", 4)
    [nothing] = checked(b"\n", b" ").problems
    assert (nothing.code, nothing.line) == ("empty_file", None)
    assert len(checked(*[b"{"] * 100).problems) == 20


def test_a_line_is_sent_with_class_batch_and_otherwise_unchanged() -> None:
    body = {"model": "m", "service_tier": "priority", "priority": "interactive", "extra": {"é": [1, None]}}
    sent = {"model": "m", "priority": "batch", "extra": {"é": [1, None]}}
    assert json.loads(request_of(line(body=body), "")) == sent
    assert json.loads(request_of(line(body={**body, "cache_salt": "s"}), "")) == {**sent, "cache_salt": "s"}


def test_lines_of_different_owners_share_no_kv() -> None:
    def salt(owner: str, **given: object) -> object:
        return json.loads(request_of(line(body={"model": "m", **given}), owner))["cache_salt"]

    assert salt("alice") == salt("alice", cache_salt=None) == salt("alice", cache_salt="")
    salts = [salt(owner, **given) for owner in ("alice", "bob") for given in ({}, {"cache_salt": "s"})]
    salts.append(salt("bob", cache_salt=salt("alice")))  # a salt that imitates another owner's
    assert len(set(salts)) == 5
    assert salt("alice", cache_salt="\ud800") not in salts
    assert salt("alice", cache_salt=0) == 0, "the gateway refuses it"


def test_a_line_is_not_sent_longer_than_it_is() -> None:
    raw = b'{"body":{"messages":"%s"}}' % ("\u4e2d" * 1000).encode()
    assert len(request_of(raw, "")) <= len(raw) + len(',"priority":"batch"')
    half = {"messages": "\u4e2d\ud800"}
    assert json.loads(request_of(line(body=half), "")) == {**half, "priority": "batch"}


def test_results_have_openais_form() -> None:
    given = answered("id", "a", 400, "req", {"error": {"message": "no\nyes"}})
    assert "\n" not in given
    assert json.loads(given) == {
        "id": "id",
        "custom_id": "a",
        "response": {"status_code": 400, "request_id": "req", "body": {"error": {"message": "no\nyes"}}},
        "error": None,
    }
    for outcome, code in ((BatchState.EXPIRED, "batch_expired"), (BatchState.CANCELLED, "batch_cancelled")):
        said = json.loads(unrun("id", "a", outcome))
        assert (said["response"], said["error"]["code"]) == (None, code)


def test_an_oversized_line_of_spaces_does_not_hide_the_lines_after_it() -> None:
    checker = checked(line(custom_id="a"), b" " * 1001)  # the runner reads no further
    assert [problem.code for problem in checker.problems] == ["line_too_large"]
