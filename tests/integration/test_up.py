"""`ballast up` and the other commands as a user runs them: real processes, a tiny model, signals."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from ballast.client import Client, SamplingParams
from tools.local.ports import free_port
from tools.model.tiny import make_tiny

START_WITHIN_S = 120.0
LONG = 2000  # tokens: takes seconds, so that the request can be observed running


def ballast(*arguments: str, address: str = "", stdin: str = "", timeout_s: float = 120.0) -> tuple[int, str, str]:
    environ = {**os.environ, "BALLAST_ADDRESS": address, "COLUMNS": "100"}
    command = [sys.executable, "-m", "tools.cli.main", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=environ)
    return done.returncode, done.stdout, done.stderr


class Up:
    """A running `ballast up` process."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._stderr = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tools.cli.main", "up", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                # A killed launcher cannot remove its temporary files, so these go into pytest's folder.
                env={**os.environ, "TMPDIR": str(log.parent)},
            )
        self.address = ""

    def wait_ready(self) -> str:
        """Waits for the ready line on standard output; returns it."""
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
        """Returns the exit status and standard output after the ready line."""
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
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", max_len=4096)


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    arguments = ["--model", str(model), "--workers", "2", "--dispatchers", "2", "--port", "0"]
    with up(tmp_path_factory.mktemp("up") / "stderr", *arguments, "--device-memory-bytes", "8MiB") as process:
        process.wait_ready()
        yield process


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    arguments = ["--model", str(model), "--workers", "1", "--port", "0", "--device-memory-bytes", "8MiB"]
    with up(tmp_path_factory.mktemp("small") / "stderr", *arguments) as process:
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
    told = f"ballast: {first}: another service answers there, which is no worker\n"
    assert ballast("health", "worker", first) == (1, "", told)


def test_refusals_of_the_cluster_are_reported_in_one_line(running: Up) -> None:
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


@pytest.mark.rotating
def test_ctrl_c_lets_a_running_request_finish_and_leaves_no_process(model: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(model), "--workers", "1", "--port", "0", "--device-memory-bytes", "8MiB"]
    with up(tmp_path / "stderr", *arguments, "--log-dir", str(tmp_path / "logs")) as process:
        assert process.wait_ready().count("\n") == 1
        children = process.children()
        assert len(children) == 7  # state server, monitor, planner, worker, dispatcher, gateway; their forker
        command = [sys.executable, "-m", "tools.cli.main", "generate", "x", "--address", process.address]
        command += ["--max-tokens", str(LONG), "--ignore-eos", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as request:
            until_running(process.address)
            process.process.send_signal(signal.SIGINT)
            answer, _ = request.communicate(timeout=120)
        assert len(json.loads(answer)["token_ids"]) == LONG
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
    """Polls through the SDK, since starting the command would take longer than generating a short answer."""
    give_up_at_s = time.monotonic() + START_WITHIN_S
    with Client(address) as client:
        while client.status().running_request_count == 0:
            assert time.monotonic() < give_up_at_s
            time.sleep(0.005)


@pytest.mark.rotating
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_stopped_while_starting_leaves_no_process(
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


@pytest.mark.rotating
def test_a_worker_killed_under_load_is_restarted_without_losing_a_token(model: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(model), "--workers", "2", "--port", "0", "--device-memory-bytes", "32MiB"]
    arguments += ["--dtype", "float64"]  # in single precision, an answer of this length may have near-ties
    sampling = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    with up(tmp_path / "stderr", *arguments) as process:
        logs = Path(re.search(r"logs: ([^)]*)\)", process.wait_ready())[1])  # pyright: ignore[reportOptionalSubscript]
        with Client(process.address) as client, ThreadPoolExecutor(8) as threads:
            expected = client.generate("A ship", sampling).token_ids
            answers = [threads.submit(client.generate, "A ship", sampling) for _ in range(8)]
            until(lambda: client.status().running_request_count >= 4)
            victim = next(w for w in process.children() if named(w, "worker-1"))
            victim.kill()
            assert all(answer.result(120).token_ids == expected for answer in answers)
            until(lambda: "worker-1 is back after" in process.stderr)
            until(lambda: {w.worker_id for w in client.status().workers if w.connected} == {"worker-0", "worker-1"})
            [told] = [line for line in process.stderr.splitlines() if "is back" in line]
            assert re.fullmatch(r"worker-1 is back after [\d.]+ s(; \d+ requests? replayed)?", told), told
        assert "worker-1 was killed" in process.stderr.splitlines()
        assert "settings" not in process.stderr
        children = process.children()
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == (0, "")
        assert f"the logs are kept in {logs}" in process.stderr
        assert "request_id=" in (logs / "dispatcher-0.log").read_text()
        assert_gone(children)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["dispatcher-0", "planner-0", "monitor-0", "valkey-server"])
def test_every_other_process_is_restarted_even_if_killed_while_starting(small: Up, name: str) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    with Client(small.address) as client:
        expected = client.generate("A ship", sampling).token_ids
    told = len(small.stderr.splitlines())
    first = next(c for c in small.children() if named(c, name) and is_program(c))
    first.kill()
    until(lambda: any(named(c, name) and c != first for c in small.children()))
    next(c for c in small.children() if named(c, name) and c != first).kill()
    until(lambda: " back" in "".join(small.stderr.splitlines()[told:][-1:]))
    with Client(small.address) as client:
        assert client.generate("A ship", sampling, deadline_s=60).token_ids == expected


@pytest.mark.rotating
def test_a_service_that_keeps_failing_is_abandoned_and_the_others_continue(model: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(model), "--workers", "2", "--port", "0", "--device-memory-bytes", "8MiB"]
    own = tmp_path / "model"
    shutil.copytree(model, own)
    arguments[1] = str(own)
    with up(tmp_path / "stderr", *arguments) as process:
        process.wait_ready()
        (own / "config.json").rename(own / "gone.json")  # a worker that starts from now on fails
        next(w for w in process.children() if named(w, "worker-1")).kill()
        until(lambda: "worker-1 is given up after 4 attempts" in process.stderr)
        with Client(process.address) as client:
            client.generate("A ship", SamplingParams(max_tokens=4), deadline_s=60)


def named(child: psutil.Process, name: str) -> bool:
    try:
        return any(name in part for part in child.cmdline())
    except psutil.Error:
        return False  # it has ended


def is_program(child: psutil.Process) -> bool:
    """Whether the child is a service, and not the tether process that starts it."""
    return not any("tether" in part for part in child.cmdline())


def until(holds: Callable[[], bool], within_s: float = START_WITHIN_S) -> None:
    give_up_at_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up_at_s
        time.sleep(0.02)


def test_a_port_in_use_is_reported_in_one_clear_line(model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        status, out, err = ballast("up", "--model", str(model), "--port", port)
    assert (status, out) == (2, "")
    assert re.search(rf"^ballast: --port: .*{port} is in use", err, re.MULTILINE), err
    assert "Traceback" not in err


def test_an_unreachable_state_server_is_reported_in_one_clear_line(model: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    status, out, err = ballast("up", "--model", str(model), "--port", "0", "--redis-url", url, timeout_s=60.0)
    assert (status, out) == (1, "")
    assert re.search(rf"^ballast: state server: {url}: .*connect", err, re.MULTILINE), err
    assert "Traceback" not in err


def test_a_memory_budget_that_is_too_small_is_reported_in_one_clear_line(model: Path) -> None:
    status, out, err = ballast("up", "--model", str(model), "--port", "0", "--device-memory-bytes", "64KiB")
    assert (status, out) == (2, "")
    assert re.search(r"^ballast: --device-memory-bytes: .*parameters alone", err, re.MULTILINE), err
    assert "Traceback" not in err
