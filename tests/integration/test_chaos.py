"""A short run of `ballast chaos`: processes and the state server break under load, and nothing is lost."""

import pytest

from ballast.cli.main import main as ballast


def test_nothing_is_lost_while_things_break(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--for", "20s", "--seed", "4", "--fault-every-s", "3"]
    broken = ["kill a worker", "stop a worker", "kill a planner", "stop a monitor", "kill the state server"]
    assert ballast(["chaos", *arguments, "--faults", *broken]) == 0
    told = capsys.readouterr()
    assert "0 lost" in told.out
    assert "0 answers of" in told.out
    assert any(
        f"{name} is " in told.err for name in ("worker-0", "worker-1", "worker-2", "planner-0", "the state server")
    )


def test_what_cannot_be_asked_for_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ballast(["chaos", "--workers", "1"]) == 2
    assert "at least 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ballast(["chaos", "--for", "soon"])
