"""`ballast batch` against servers whose answers break off, and with wrong arguments."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from tools.cli.main import main


@contextlib.contextmanager
def answering(*answers: bytes) -> Generator[str]:
    """The URL of a server that sends these bytes, one after the other, on successive connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                with server.accept()[0] as link:
                    link.recv(1 << 16)
                    link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        thread.join(30)


BATCH = json.dumps(
    {
        "id": "b",
        "status": "completed",
        "output_file_id": "f",
        "request_counts": {"completed": 1, "failed": 0, "total": 1},
    }
).encode()


def ok(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body


def test_results_that_break_off_are_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(ok(BATCH), ok(b'{"custom_id": 1', length=500)) as url:
        assert main(["batch", "results", "b", "--out", str(tmp_path / "out"), "--url", url]) == 1
    assert "connection was lost" in capsys.readouterr().err


def test_an_uncreatable_result_file_is_refused_before_the_batch_is_awaited(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["batch", "submit", "x.jsonl", "--wait", "--out", str(tmp_path / "none" / "out")])


def test_results_of_a_batch_that_did_not_complete_are_written_with_a_status(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    expired = BATCH.replace(b'"completed",', b'"expired",')
    with answering(ok(expired), ok(b"{}\n")) as url:
        assert main(["batch", "results", "b", "--url", url]) == 1
    said = capsysbinary.readouterr()
    assert said.out == b"{}\n"
    assert b"expired" in said.err


def test_an_answer_that_breaks_off_or_is_no_json_is_a_failure_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for answer in (ok(BATCH, length=500), ok(b"<html>"), b""):
        with answering(answer) as url:
            assert main(["batch", "status", "b", "--url", url]) == 1
        said = capsys.readouterr().err
        assert "unexpected" not in said
        assert said.count("\n") == 1


def test_wrong_arguments_of_batch_are_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"url": "/v1/completions"}\n')
    assert main(["batch", "submit", str(file), "--out", "x", "--url", "http://127.0.0.1:1"]) == 2
    assert "--wait" in capsys.readouterr().err
    for url in ("http://[bad/v1", "http://h:port/v1", "http:///v1", "h:1"):
        assert main(["batch", "list", "--url", url]) == 2
    os.mkfifo(tmp_path / "pipe")
    assert main(["batch", "submit", str(tmp_path / "pipe"), "--url", "http://127.0.0.1:1"]) == 2
    assert "must be a regular file" in capsys.readouterr().err
    monkeypatch.setenv("BALLAST_CA_FILE", str(file))
    assert main(["batch", "list"]) == 2
    assert "in.jsonl" in capsys.readouterr().err


def test_a_file_whose_name_is_not_utf8_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / os.fsdecode(b"\xff.jsonl")
    file.write_text('{"url": "/v1/completions"}\n')
    assert main(["batch", "submit", str(file), "--url", "http://127.0.0.1:1/v1"]) == 1
    assert "refused" in capsys.readouterr().err
