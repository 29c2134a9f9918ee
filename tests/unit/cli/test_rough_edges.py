"""Usability bugs that new users ran into. Each of these tests once failed."""

import ast
import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ballast.client import Client
from ballast.common.errors import DeadlineExceeded, Unavailable
from ballast.common.extras import DISTRIBUTION
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from tests.support.scripted_dispatcher import ScriptedDispatcher, serving_in_thread, worker_status
from tools.cli import checks
from tools.cli.checks import Verdict
from tools.cli.looks import query_dispatchers
from tools.cli.main import _COMMANDS, build_parser, main
from tools.dashboard.watched import describe

ROOT = Path(__file__).parents[3]
DROP = pb.Transition(
    epoch=4,
    kind="drop",
    phase="done",
    reason="overload: 3.0 MiB of KV needed",
    summary="group {w0,w1}: dropped layers 2-3 of w0, 0-1 of w1",
    age_s=61.0,
    exchange_s=0.5,
    freed_parameter_bytes=75 << 30,
    kv_bytes_exchanged=24 << 30,
    victim_count=220,
    max_stall_s=0.25,
    prediction=pb.Prediction(
        decision="1 pair",
        age_s=61.0,
        horizon_s=30.0,
        ttft_p99_s=2.0,
        tpot_s=0.05,
        outcome=pb.Outcome(after_s=30.0, first_count=40, ttft_p99_s=2.5),
        summary="1 pair: predicted P99 TTFT 2.00 s",
    ),
)


class ScriptedPlanner(planner_pb2_grpc.PlannerServiceServicer):
    """Reports one past drop and accepts every request."""

    def __init__(self) -> None:
        self.drops: list[pb.DropRequest] = []

    def ExplainPlan(self, request: pb.ExplainPlanRequest, context: Any) -> pb.ExplainPlanResponse:
        answer = pb.ExplainPlanResponse(lines=["needed 1.0 GiB", "more"], required_bytes=request.required_bytes)
        answer.predictions.append(DROP.prediction)
        answer.layout.epoch, answer.layout.layer_count = 5, 4
        answer.layout.groups.add(group_id="g").members.add(worker_id="w0", incarnation=1, address="a:1", last_layer=4)
        return answer

    def Drop(self, request: pb.DropRequest, context: Any) -> pb.DropResponse:
        self.drops.append(request)
        return pb.DropResponse(epoch=4, lines=["merged: w0 w1"])

    def Restore(self, request: pb.RestoreRequest, context: Any) -> pb.RestoreResponse:
        return pb.RestoreResponse(epoch=4)

    def ListTransitions(self, request: pb.ListTransitionsRequest, context: Any) -> pb.ListTransitionsResponse:
        return pb.ListTransitionsResponse(transitions=[DROP], overload_policy="drop", held_s=90.0)


@contextlib.contextmanager
def serving_planner() -> Generator[tuple[ScriptedPlanner, str]]:
    """Yields a scripted planner and its address. It runs on its own event loop, because its servicer is written for
    grpc.aio.
    """
    planner = ScriptedPlanner()  # pyright: ignore[reportAbstractUsage]
    loop, ready = asyncio.new_event_loop(), threading.Event()
    told: list[str] = []

    async def serve() -> grpc.aio.Server:
        server = grpc.aio.server()
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(_Awaited(planner), server)  # pyright: ignore[reportArgumentType]
        told.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        ready.set()
        return server

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(serve(), loop).result(30)
    try:
        assert ready.wait(30)
        yield planner, told[0]
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


class _Awaited:
    def __init__(self, planner: ScriptedPlanner) -> None:
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        plain = getattr(self._planner, name, None)

        async def call(request: Any, context: Any) -> Any:
            assert plain is not None
            return plain(request, context)

        return call


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedPlanner]:
    with serving_planner() as (scripted, address):
        monkeypatch.setenv("BALLAST_ADDRESS", address)
        yield scripted


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedDispatcher]:
    with serving_in_thread() as (scripted, address):
        monkeypatch.setenv("BALLAST_ADDRESS", address)
        scripted.status.workers.append(worker_status())
        yield scripted


@pytest.fixture
def nobody() -> Iterator[str]:
    with socket.socket() as holder:  # bound, not listening: connections are refused and the port stays reserved
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize("command", [["plan"], ["drop", "--workers", "a,b"], ["restore"], ["transitions"]])
def test_planner_commands_take_several_addresses_and_try_the_next(
    command: list[str], planner: ScriptedPlanner, nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    several = f"{nobody},{os.environ['BALLAST_ADDRESS']}"
    assert main([*command, "--address", several]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [["restore"], ["drop"], ["park", "w0"], ["wake", "w0"]])
def test_a_request_that_is_sent_again_keeps_its_id(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[str] = []

    class Planner:
        async def record(self, request: Any, timeout: float) -> None:
            ids.append(request.request_id)
            raise Unavailable("planner", "has failed meanwhile")

        Restore = Drop = ParkWorker = WakeWorker = record

    def ask_twice(addresses: str, ask: Any, **__: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(Unavailable):
                asyncio.run(ask(Planner()))
        raise Unavailable("planner", "has failed twice")

    for module in ("layouts", "park"):
        monkeypatch.setattr(f"tools.cli.{module}.ask_planner", ask_twice)
    assert main(command) == 1
    assert ids == [ids[0]] * 2


@pytest.mark.parametrize("command", ["plan", "drop", "restore", "transitions", "status", "top"])
def test_a_malformed_address_is_a_usage_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--address", "nonsense"]) == 2
    assert capsys.readouterr().err == "ballast: address: must be host:port, got 'nonsense'\n"


@pytest.mark.parametrize("command", ["plan", "drop", "restore", "transitions", "status", "generate"])
def test_an_unreachable_address_is_reported_in_the_same_words(
    command: str, nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *(["x"] if command == "generate" else []), "--address", nobody]) == 1
    want = f"ballast: {nobody}: cannot connect; does a dispatcher run there, without TLS?\n"
    assert capsys.readouterr().err == want


def test_status_sums_the_reports_of_all_dispatchers(
    dispatcher: ScriptedDispatcher, nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatcher.status.running_request_count = 78
    dispatcher.status.requests_total["length"] = 3
    with serving_in_thread("d1") as (other, address):
        other.status.running_request_count = 86
        other.status.requests_total["length"] = 4
        assert main(["status", "--address", f"{os.environ['BALLAST_ADDRESS']},{address},{nobody}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["running_request_count"], told["requests_total"]) == (164, {"length": 7})
    assert [one["dispatcher_id"] for one in told["dispatchers"]] == ["d0", "d1", ""]
    assert "cannot connect" in told["dispatchers"][2]["error"]


# ---------------------------------------------------------------- drops and transitions


def test_a_drop_takes_sizes_and_times_as_people_write_them(planner: ScriptedPlanner) -> None:
    assert main(["drop", "--bytes", "1.5GiB", "--hold", "10m", "--no-wait"]) == 0
    (request,) = planner.drops
    assert (request.required_bytes, request.hold_s) == (3 << 29, 600.0)


def test_no_wait_reports_the_started_transition(planner: ScriptedPlanner, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", "--no-wait"]) == 0
    assert "epoch 4" in capsys.readouterr().out


def test_transitions_are_a_table_with_details_on_request(
    planner: ScriptedPlanner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # a usual terminal width
    assert main(["transitions"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^4 +drop +done +1 min 1 +500.0 ms +-75.0 GiB +24.0 GiB +220 +250.0 ms *$", shown, re.MULTILINE)
    assert re.search(r"^4 +overload: 3.0 MiB of KV needed *$", shown, re.MULTILINE)
    assert "held: no automatic restore for 1 min 30 s" in shown
    assert "dropped layers" not in shown
    assert main(["transitions", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert "dropped layers 2-3 of w0" in shown
    assert "1 pair: predicted P99 TTFT 2.00 s" in shown
    assert main(["plan", "--explain"]) == 0
    assert "1 min 1 s ago, 1 pair: predicted P99 TTFT 2.00 s" in capsys.readouterr().out


def test_the_dashboard_describes_drops_and_restores_from_the_checkpoint() -> None:
    assert (
        describe(DROP)
        == "75.0 GiB of parameters overboard in 0.50 s; 220 running requests moved, the longest pause 250 ms"
    )
    after_a_loss = pb.Transition(kind="restore", phase="done", reason="loss: w0 was left of a group", prepare_s=3.5)
    assert describe(after_a_loss) == "the parameters back on board in 3.50 s"


# ---------------------------------------------------------------- machine-readable output


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (
            ["plan", "--bytes", "1GiB"],
            {"required_bytes", "freed_bytes", "shortfall_bytes", "lines", "layout", "predictions"},
        ),
        (["drop", "--workers", "a,b"], {"epoch", "lines", "transition"}),
        (["restore"], {"epoch", "lines", "transition"}),
        (["transitions"], {"overload_policy", "held_s", "transitions"}),
    ],
)
def test_planner_commands_print_json(
    command: list[str], keys: set[str], planner: ScriptedPlanner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == keys
    if "layout" in told:
        assert told["predictions"][0]["outcome"] == {
            "after_s": 30,
            "first_count": 40,
            "ttft_p99_s": 2.5,
            "tpot_s": None,
            "tokens_per_s": None,
        }
        assert told["layout"]["groups"][0]["members"][0]["last_layer"] == 3, (
            "last_layer is inclusive, as in all JSON output"
        )


def test_drain_health_doctor_and_model_print_json(
    dispatcher: ScriptedDispatcher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def told(*command: str, status: int = 0) -> Any:
        assert main([*command, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    address = os.environ["BALLAST_ADDRESS"]
    assert told("drain", "worker-0") == {"name": "worker-0", "running_request_count": 5}
    assert told("undrain", address) == {"name": address}
    assert told("health", "dispatcher", address)["healthy"] is True
    sick = told("health", "worker", address, status=1)
    assert (sick["healthy"], bool(sick["why"])) == (False, True)
    assert told("top", "--once", "--interval-s", "0.05")["status"]["dispatcher_id"] == "d0"
    made = told("model", "make-tiny", "--out", str(tmp_path / "m"))
    assert told("model", "info", str(tmp_path / "m")) == made
    assert made["layer_count"] > 0
    fit = 0 if importlib.util.find_spec("torch") else 1  # without torch doctor fails: no worker can run
    doctor = ("doctor", "--port", address.rpartition(":")[2], "--device-memory-bytes", "64MiB")
    findings = [one for one in told(*doctor, status=fit)["findings"] if one["subject"] != "torch"]
    assert {finding["verdict"] for finding in findings} <= {"ok", "warn"}


_WITHOUT_JSON = {"up", "serve", "chat", "chaos", "completion", "bench", "model", "tokens", "record", "batch", "scale"}


def test_every_command_with_output_has_a_documented_json_flag() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    parser = build_parser("*")
    commands = next(action.choices for action in parser._actions if action.dest == "command")
    assert commands is not None
    for name in _COMMANDS:
        if name not in _WITHOUT_JSON:
            flags = commands[name]._option_string_actions  # type: ignore[index]
            assert "--json" in flags, name
            assert f"`{name}" in page, name
    actions = next(action.choices for action in commands["batch"]._actions if action.dest == "action")  # type: ignore[index]
    for name in set(actions or ()) - {"results"}:  # `results` prints JSON lines anyway
        assert "--json" in actions[name]._option_string_actions, name  # type: ignore[index]


# ---------------------------------------------------------------- errors


def test_a_folder_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "make-tiny", "--out", "/proc/foo"]) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "/proc/foo" in said


def test_a_full_disk_is_not_reported_as_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(*_: object) -> int:
        with Path("/dev/full").open("w") as disk:
            disk.write("x")
        return 0

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tools.cli.status.run", full)
    assert main(["status"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("ballast: no space is left on the disk")
    assert "TMPDIR" in said
    assert "bug" not in said
    assert not [*tmp_path.iterdir()]


def test_a_bug_is_one_line_and_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def crash(*_: object) -> int:
        raise ZeroDivisionError("of our own making")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tools.cli.status.run", crash)
    assert main(["status"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("ballast: unexpected ZeroDivisionError: of our own making; this is a bug: please report it")
    (crash_file,) = tmp_path.iterdir()
    assert "Traceback" in crash_file.read_text()
    monkeypatch.setenv("BALLAST_DEBUG", "1")
    assert main(["status"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_errors_name_this_distribution_and_no_other_ones() -> None:
    """On the package index, the name `ballast` belongs to another project."""
    wrong = re.compile(r"pip install[^\n]*['\" ]ballast(\[|'|\"| |$)")
    for folder in ("ballast", "services", "sim", "tools", "benchmarks", "docs"):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
            assert not wrong.search(path.read_text()), path
    assert f'name = "{DISTRIBUTION}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["drop", "--bytes", "lots"], "--bytes: must be a size such as 512MiB or 16GiB, got 'lots'"),
        (["drop", "--hold", "later"], "--hold: must be a time such as 90s, 10m or 2h, got 'later'"),
        (["doctor", "--device-memory-bytes", "lots"], "--device-memory-bytes: must be a size"),
        (["bench", "replay", "--trace", "t", "--json", "/nope/o.json"], "there is no folder /nope; make it first"),
        (["bench", "replay", "--trace", "t", "--plot", "figure.xyz"], "must end in .png, .svg or .pdf"),
        (["sim", "--plot", "/nope/f.png"], "there is no folder /nope"),
        (["sim", "--json", "/tmp"], "/tmp is a folder; name a file"),
        (["profile", "--model", "m", "--out", "/nope/p.json"], "there is no folder /nope"),
    ],
)
def test_unusable_paths_are_reported_before_any_work(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_replay_names_the_missing_trace_before_it_looks_for_a_cluster(
    nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "replay", "--trace", "/nowhere/t.csv", "--address", nobody]) == 2
    assert "/nowhere/t.csv" in capsys.readouterr().err


def test_flags_that_would_have_no_effect_are_refused(
    dispatcher: ScriptedDispatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--logprobs", "3"]) == 2
    assert "--json" in capsys.readouterr().err
    assert main(["generate", "x", "--token-ids", "1,2"]) == 2
    assert "the prompt already" in capsys.readouterr().err


def test_logprobs_are_printed_as_json(dispatcher: ScriptedDispatcher, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--json", "--logprobs", "0"]) == 0
    [first, *_] = json.loads(capsys.readouterr().out)["logprobs"]
    assert first["chosen"] == {"token_id": 0, "logprob": -0.5, "token": "\ufffd"}


def test_a_turn_that_fails_does_not_end_the_chat(
    dispatcher: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatcher.status.model.name, dispatcher.status.model.max_model_len = "m", 9
    dispatcher.refuse = [DeadlineExceeded("too late")]
    lines = iter(("one", "two"))

    def read(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["chat"]) == 0
    said = capsys.readouterr()
    assert "t0 t1 t2" in said.out
    assert said.err == "ballast: too late\n"


def test_a_token_may_end_with_a_line_break(
    dispatcher: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BALLAST_TOKEN", "abc\n")
    assert main(["generate", "x"]) == 0
    monkeypatch.setenv("BALLAST_TOKEN", "a\nb")
    assert main(["generate", "x"]) == 2
    assert "printable ASCII" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["up", "--model", "org/name", "--tensor-parallel-size", "x"], "tensor_parallel_size"),
        (["up", "--model", "org/name", "--lora-modules", "x"], "--lora-modules"),
        (["up", "--lora-modules", "x"], "--lora-modules"),
        (["scale", "--listen", "127.0.0.1:99999", "--secret-file", "x", "--", "x", "{wanted}"], "--listen"),
        (["model", "context", "--model", "Qwen2.5-14B", "--gpu", "L4", "--gpus-per-instance", "-1"], "--gpus-per"),
        (["model", "make-tiny", "--out", "nowhere", "--seed", "-1"], "seed"),
    ],
)
def test_a_wrong_value_is_a_usage_error_before_any_work(
    command: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_model(*_: Any, **__: Any) -> None:
        pytest.fail("the model is downloaded")

    monkeypatch.setattr("tools.cli.up.find_model", find_model)
    assert main(command) == 2
    assert named in capsys.readouterr().err


def test_a_dispatcher_that_does_not_answer_in_time_hides_no_other(dispatcher: ScriptedDispatcher) -> None:
    with serving_in_thread("d1") as (stuck, address):
        stuck.status_pause_s = 5.0
        addresses = [os.environ["BALLAST_ADDRESS"], address]
        with Client(addresses, call_timeout_s=0.5) as client:
            [first, second] = query_dispatchers(client).dispatchers
        assert (first.dispatcher_id, first.error) == ("d0", "")
        assert (second.address, second.error) == (address, "no answer in time")


# ---------------------------------------------------------------- batch


def test_doctor_knows_the_ports_of_ballast_itself(dispatcher: ScriptedDispatcher) -> None:
    port = int(os.environ["BALLAST_ADDRESS"].rpartition(":")[2])
    finding = checks.ports(port, 1)
    assert finding.verdict is Verdict.WARN
    assert "Ballast serves" in finding.text


# ---------------------------------------------------------------- start-up time and completion


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help_need_no_command(flag: str) -> None:
    """Checks which modules are imported, since timings are unreliable on a busy machine."""
    code = (
        "import sys\nfrom tools.cli.main import main\n"
        f"try: main(['{flag}'])\nexcept SystemExit: pass\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'grpc', 'rich', 'pydantic', 'numpy', 'google'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_lists_every_command_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, (_, text) in _COMMANDS.items():
        assert f"{name} {text}" in shown


def test_every_flag_has_help_and_describes_its_value() -> None:
    mute: list[str] = []

    def look(parser: Any) -> None:
        for action in parser._actions:
            if isinstance(action.choices, dict):
                for inner in action.choices.values():
                    look(inner)
            elif not action.help or (action.metavar == "X" and action.type is None):
                mute.append(f"{parser.prog} {action.option_strings or action.dest}")

    look(build_parser("*"))
    assert mute == []


def test_shells_can_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert "complete " in capsys.readouterr().out
    environ = {**os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": "ballast transi", "COMP_POINT": "14", "IFS": "\013"}
    environ |= {"_ARGCOMPLETE_IFS": "\013", "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout"}
    code = "from tools.cli.main import main; main([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert "transitions" in done.stdout


def test_modules_of_commands_exist() -> None:
    for module, _ in _COMMANDS.values():
        source = Path(str(importlib.import_module(module).__file__)).read_text()
        assert any(isinstance(node, ast.FunctionDef) and node.name == "add_parser" for node in ast.parse(source).body)
