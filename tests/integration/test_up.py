"""`ballast up` and the other commands as a person uses them: real processes, a tiny model, signals."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest

from ballast.client import Client
from ballast.model.tiny import make_preset

START_WITHIN_S = 120.0


def ballast(*arguments: str, address: str = "", stdin: str = "", timeout_s: float = 120.0) -> tuple[int, str, str]:
    environ = {**os.environ, "BALLAST_ADDRESS": address, "COLUMNS": "100"}
    command = [sys.executable, "-m", "ballast.cli.main", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=environ)
    return done.returncode, done.stdout, done.stderr


class Up:
    """A running `ballast up`."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._stderr = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ballast.cli.main", "up", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                # What a killed launcher cannot remove lies where pytest does.
                env={**os.environ, "TMPDIR": str(log.parent)},
            )
        self.address = ""

    def wait_ready(self) -> str:
        """The line on standard output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"ready: .* at ([\d.:, ]+) \(logs", line)
        assert found is not None, (line, self.stderr)
        self.address = found[1].replace(" ", "")
        return line

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self, timeout_s: float = 120.0) -> tuple[int, str]:
        """Exit status, and what stood on standard output behind the first line."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, rest


@contextlib.contextmanager
def up(log: Path, *arguments: str) -> Generator[Up]:
    running = Up(log, *arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preset("tiny", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    arguments = ["--model", str(model), "--workers", "2", "--dispatchers", "2", "--port", "0"]
    with up(tmp_path_factory.mktemp("up") / "stderr", *arguments, "--device-memory-bytes", "8MiB") as process:
        process.wait_ready()
        yield process


def test_generate(running: Up) -> None:
    greedy = ["--max-tokens", "16", "--temperature", "0", "--ignore-eos"]
    status, streamed, _ = ballast("generate", "A ship", *greedy, address=running.address)
    assert status == 0
    status, text, _ = ballast("generate", "-", "--json", *greedy, address=running.address, stdin="A ship")
    answer = json.loads(text)
    assert (status, answer["text"] + "\n") == (0, streamed)
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (16, "length")


def test_chat_over_a_pipe(running: Up) -> None:
    status, out, err = ballast("chat", "--max-tokens", "4", "--seed", "1", address=running.address, stdin="one\ntwo\n")
    assert (status, err) == (0, "")
    assert out.count("\n") >= 2


def test_status_shows_that_memory_adds_up(running: Up) -> None:
    status, page, _ = ballast("status", address=running.address)
    assert status == 0
    assert page.count("adds up") == 2
    assert page.count("serving") == 2
    _, text, _ = ballast("status", "--json", address=running.address)
    for worker in json.loads(text)["workers"]:
        memory = worker["load"]["memory"]
        assert memory["budget_bytes"] == 8 << 20
        assert memory["parameter_bytes"] + memory["kv_bytes"] + memory["free_bytes"] == 8 << 20
    status, page, _ = ballast("top", "--once", "--interval-s", "0.2", address=running.address)
    assert (status, "tokens/s" in page) == (0, True)


def test_health_of_every_service(running: Up) -> None:
    first = running.address.split(",")[0]
    assert ballast("health", "dispatcher", first)[0] == 0
    _, text, _ = ballast("status", "--json", address=first)
    for worker in json.loads(text)["workers"]:
        assert ballast("health", "worker", worker["address"])[0] == 0
    assert ballast("health", "worker", first)[0] == 1


def test_what_the_cluster_refuses_is_said_in_one_line(running: Up) -> None:
    for arguments, word in (
        (["--max-tokens", "100000"], "max_model_len"),
        (["--token-ids", "99999"], "vocabulary"),
        (["--request-id", "x" * 200], "request_id"),
    ):
        prompt = [] if "--token-ids" in arguments else ["x"]
        status, out, err = ballast("generate", *prompt, *arguments, address=running.address)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert word in err


def test_bench_against_a_running_cluster(running: Up, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.0,5,4\n0.1,9,6\n")
    arguments = ["bench", "replay", "--trace", str(trace), "--json", str(tmp_path / "out.json")]
    status, out, err = ballast(*arguments, address=running.address)
    assert status == 0, out + err
    assert (tmp_path / "out.json").is_file()


def test_ctrl_c_lets_a_running_request_finish_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(model), "--workers", "1", "--port", "0", "--device-memory-bytes", "8MiB"]
    with up(tmp_path / "stderr", *arguments, "--log-dir", str(tmp_path / "logs")) as process:
        assert process.wait_ready().count("\n") == 1
        children = process.children()
        assert len(children) == 6  # state server, monitor, planner, worker, dispatcher, gateway
        command = [sys.executable, "-m", "ballast.cli.main", "generate", "x", "--address", process.address]
        command += ["--max-tokens", "400", "--ignore-eos", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as request:
            until_running(process.address)
            process.process.send_signal(signal.SIGINT)
            answer, _ = request.communicate(timeout=120)
        assert len(json.loads(answer)["token_ids"]) == 400
        assert process.wait() == (0, "")
        assert_gone(children)
        assert process.stderr.splitlines() == [
            "starting 1 worker ...",
            "stopping; running requests finish (again: stop at once)",
        ]
        assert {path.name for path in (tmp_path / "logs").iterdir()} == {
            f"{service}-0.log" for service in ("monitor", "planner", "worker", "dispatcher", "gateway")
        }


def until_running(address: str) -> None:
    """Asked with the SDK: the command takes longer to start than a short answer takes."""
    give_up_at_s = time.monotonic() + 20
    with Client(address) as client:
        while client.status().running_request_count == 0:
            assert time.monotonic() < give_up_at_s
            time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_stopped_while_starting_leaves_nothing(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ["--model", str(model), "--port", "0", "--log-dir", str(tmp_path / "logs")]
    with up(tmp_path / "stderr", *arguments) as process:
        give_up_at_s = time.monotonic() + START_WITHIN_S
        while len(children := process.children()) < 5:
            assert time.monotonic() < give_up_at_s, process.stderr
            time.sleep(0.02)
        process.process.send_signal(number)
        status, out = process.wait()
        assert (status, out) == (130 if number == signal.SIGTERM else -signal.SIGKILL, "")
        assert_gone(children)


def test_a_service_that_dies_ends_it_with_the_log(model: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(model), "--workers", "1", "--port", "0", "--device-memory-bytes", "8MiB"]
    with up(tmp_path / "stderr", *arguments) as process:
        process.wait_ready()
        children = process.children()
        (worker,) = [child for child in children if "services.worker" in child.cmdline()]
        worker.kill()
        assert process.wait() == (1, "")
        assert "ballast: worker-0: was killed by SIGKILL; its log ends with" in process.stderr
        assert "serving" in process.stderr
        assert_gone(children)


def test_a_taken_port_is_one_clear_line(model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        status, out, err = ballast("up", "--model", str(model), "--port", port)
    assert (status, out) == (2, "")
    assert re.search(rf"^ballast: dispatcher-0: port: .*{port}", err, re.MULTILINE), err
    assert "Traceback" not in err


def test_a_budget_that_is_too_small_is_one_clear_line(model: Path) -> None:
    status, out, err = ballast("up", "--model", str(model), "--port", "0", "--device-memory-bytes", "64KiB")
    assert (status, out) == (2, "")
    assert re.search(r"^ballast: worker-\d: .*device_memory_bytes", err, re.MULTILINE), err
    assert "Traceback" not in err
