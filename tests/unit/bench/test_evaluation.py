"""The evaluation page: its markers, its commands, and the text generated into it."""

import re
from pathlib import Path

import pytest

from benchmarks import evaluation
from tests.unit.bench.samples import write_comparison

pytest.importorskip("matplotlib")


def mark(part: str) -> str:
    return f"<!-- begin {part}: written by a program -->\n"


def test_every_part_has_its_place_and_fits_into_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = evaluation.PAGE.read_text()
    named = ["emulated", *(part.name for part in evaluation.parts(None))]  # "emulated": benchmarks/regret_emulated.py
    assert re.findall(r"<!-- begin (\w+): ", page) == named
    assert evaluation.main(["plan", "comparison", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    minutes = sum(int(m) * 60 + int(s) for m, s in re.findall(r"about (\d+):(\d+) min", said)) / 60
    assert 5 < minutes < 25
    assert not list(tmp_path.iterdir()), "`plan` writes no files"
    assert evaluation.main(["plan", "comparisons"]) == 2
    assert "unknown: comparisons" in capsys.readouterr().err


def test_results_are_written_into_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures, out = tmp_path / "docs" / "page.md", tmp_path / "docs" / "figures", tmp_path / "out"
    page.parent.mkdir()
    parts = [part.name for part in evaluation.parts(None)]
    page.write_text("".join(f"{mark(name)}Not measured yet.\n<!-- end {name} -->\n" for name in parts))
    write_comparison(out / "extreme" / "workers-2", ("extreme-spiky",), repetitions=1)
    (out / "extreme" / "workers-2" / "plan.json").write_text("{}")
    given = ["write", "--out", str(out), "--page", str(page), "--figures", str(figures)]
    assert evaluation.main(given) == 0
    assert "wrote extreme into" in capsys.readouterr().out
    made = page.read_text()
    assert made.count("Not measured yet.") == len(parts) - 1
    assert "Not measured yet." not in made.partition(mark("extreme"))[2].partition("<!-- end extreme -->")[0]
    assert "| drop | 1 |" in made
    assert "7 runs on a cpu, 2 cores, Python 3.11, commit unknown" in made
    (figure,) = figures.iterdir()
    assert f"![extreme-spiky](figures/{figure.name})" in made
