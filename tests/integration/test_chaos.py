"""A minute of `ballast chaos`: every kind of fault is injected under load, and no request is lost."""

import re
import tempfile
from pathlib import Path

import pytest

from tools.cli.main import main as ballast

pytestmark = pytest.mark.rotating


def test_no_request_is_lost_under_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    status = ballast(["chaos", "--secure", "--for", "60s", "--seed", "4", "--fault-every-s", "1.5"])
    told = capsys.readouterr()
    assert status == 0, f"{told.out}\n{told.err}"
    assert "0 lost" in told.out
    assert "0 answers of" in told.out
    kinds = re.findall(r"^(?!fault)(\S.{37})\s+[0-9]+(?: +[0-9.]+ s){4}$", told.out, re.MULTILINE)
    # On a busy machine each fault takes longer, so fewer are injected.
    assert len(kinds) >= 6, f"too few kinds of faults were injected: {kinds}"
    assert list(tmp_path.iterdir()) == [], "a successful run writes no logs unless asked to"


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ballast(["chaos", "--workers", "1"]) == 2
    assert "at least 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ballast(["chaos", "--for", "soon"])
