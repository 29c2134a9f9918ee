import io
import json
import os
import socket
from collections.abc import Iterator

import pytest

from ballast.common.errors import DeadlineExceeded, Overloaded
from tests.support.scripted_dispatcher import ScriptedDispatcher, serving_in_thread, worker_status
from tools.cli.main import main


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedDispatcher]:
    with serving_in_thread() as (dispatcher, address):
        monkeypatch.setenv("BALLAST_ADDRESS", address)
        yield dispatcher


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_generate_prints_the_text(scripted: ScriptedDispatcher, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--max-tokens", "3", "--temperature", "0", "--stop", "x", "--usage"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "t0 t1 t2 \n"
    assert "5 prompt + 3 new tokens" in captured.err
    (request,) = scripted.requests
    assert (request.text, request.sampling.max_tokens, list(request.sampling.stop)) == ("hello", 3, ["x"])
    assert request.sampling.temperature == 0


def test_generate_reads_its_prompt_from_a_pipe(
    scripted: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, "two\nlines")
    assert main(["generate", "--json", "--request-id", "r1"]) == 0
    assert scripted.requests[0].text == "two\nlines"
    answer = json.loads(capsys.readouterr().out)
    assert (answer["request_id"], answer["token_ids"], answer["finish_reason"]) == ("r1", [0, 1, 2], "length")


def test_generate_takes_token_ids_and_chat(scripted: ScriptedDispatcher) -> None:
    assert main(["generate", "--token-ids", "1, 2,3"]) == 0
    assert main(["generate", "--chat", "hi"]) == 0
    by_ids, by_chat = scripted.requests
    assert list(by_ids.token_ids.ids) == [1, 2, 3]
    assert by_chat.conversation.messages[0].content == "hi"


def test_chat_over_a_pipe_is_one_turn_per_line(
    scripted: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, "one\n\ntwo\n")
    assert main(["chat", "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "t0 t1 t2 \n" * 2
    roles = [[m.role for m in request.conversation.messages] for request in scripted.requests]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]


def test_status_and_top(scripted: ScriptedDispatcher, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.status.workers.append(worker_status())
    assert main(["status"]) == 0
    assert "adds up" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["workers"][0]["load"]["memory"]
    assert memory["parameter_bytes"] + memory["kv_bytes"] + memory["free_bytes"] == memory["budget_bytes"]
    assert main(["top", "--once", "--interval-s", "0.05"]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_drain(scripted: ScriptedDispatcher, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.status.workers.append(worker_status())
    assert main(["drain", "worker-7"]) == 1
    assert capsys.readouterr().err == "ballast: no worker is called worker-7; there are: worker-0\n"
    assert main(["drain", "worker-0"]) == 0, (
        "no process listens at the worker's address, so only the dispatcher is asked"
    )
    assert capsys.readouterr().out == "worker-0 takes nothing new; 5 requests still running there\n"


def test_a_dispatcher_is_drained_and_undrained(
    scripted: ScriptedDispatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    address = os.environ["BALLAST_ADDRESS"]
    assert main(["drain", address]) == 0
    assert scripted.drained
    assert main(["undrain", address]) == 0
    assert not scripted.drained
    assert capsys.readouterr().out.endswith(f"{address} takes requests again\n")
    assert main(["undrain", "worker-0"]) == 2
    assert "worker-0: is no dispatcher's HOST:PORT; a worker that drains" in capsys.readouterr().err


def test_health(
    scripted: ScriptedDispatcher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    address = os.environ["BALLAST_ADDRESS"]
    assert main(["health", "dispatcher", address]) == 0
    assert main(["health", "monitor", address]) == 0
    assert main(["health", "worker", address]) == 1
    assert "ballast: " in capsys.readouterr().err


def test_an_unreachable_cluster_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        for command in (["status"], ["generate", "x"], ["top", "--once"], ["drain", "w"]):
            assert main([*command, "--address", address]) == 1
            assert (
                capsys.readouterr().err
                == f"ballast: {address}: cannot connect; does a dispatcher run there, without TLS?\n"
            )
        assert main(["health", "worker", address]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--temperature", "-1"], "sampling.temperature: must be in [0, 100], got -1.0"),
        (["generate", "x", "--top-p", "nan"], "sampling.top_p: must be in (0, 1], got nan"),
        (["generate", "--token-ids", "1,x"], "--token-ids: must be whole numbers"),
        (["status", "--address", "nowhere"], "address: must be host:port, got 'nowhere'"),
        (["top", "--interval-s", "0"], "--interval-s: must be between"),
        (["up", "--model", "/no/such/folder"], "/no/such/folder"),
        (["up", "--workers", "-1"], "--workers: must be between 0 and 256, got -1"),
        (["up", "--port", "70000"], "--port: must be between 0 and 65535; got 70000"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ballast: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_errors_of_the_cluster(scripted: ScriptedDispatcher, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.refuse = [Overloaded("backlog full", 1.5), DeadlineExceeded("too late")]
    assert main(["generate", "x"]) == 1
    assert capsys.readouterr().err == "ballast: backlog full (try again in 1.5 s)\n"
    assert main(["generate", "x"]) == 1
    assert capsys.readouterr().err == "ballast: too late\n"


def test_unknown_arguments_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in ((["nonsense"], 2), (["status", "--nonsense"], 2), (["--version"], 0), (["--help"], 0)):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == status
    assert "ballast 0.1.0" in capsys.readouterr().out
