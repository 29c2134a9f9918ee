"""Tables, figure and command line of `bench`."""

import argparse
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ballast.common.errors import ConfigError
from tests.unit.bench.samples import bench_result, bursty_run, dropped_run
from tools.bench.plot import merged_spans, plot_result
from tools.bench.progress import ProgressDisplay, describe
from tools.bench.records import ReplayRun
from tools.bench.replay import ReplayProgress
from tools.bench.results import policy_result
from tools.bench.table import duration, render
from tools.cli.main import build_parser


def printed(result: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(result)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_shows_figures_with_units() -> None:
    run = bursty_run()
    text = printed(render(bench_result(run)))
    for wanted in ("TTFT", "TPOT", "p999", " ms", " s", "output tokens/s", "MiB", "refused", "1 failed", "2 cut to"):
        assert wanted in text
    assert "interrupted" not in text
    run.complete = False
    assert "interrupted" in printed(render(bench_result(run)))


def test_table_of_nothing_has_dashes() -> None:
    assert "-" in printed(render(bench_result(ReplayRun([], [], False, 0.0, 0))))


def test_verification_is_shown_once_available() -> None:
    result = bench_result(bursty_run())
    verified = result.policies["recompute"].model_copy(
        update={"verified_count": 24, "token_mismatches": 0, "near_ties": 1}
    )
    text = printed(render(result.model_copy(update={"policies": {"recompute": verified}})))
    assert "24 answers: 0 differing tokens, 1 near-ties" in text


@pytest.mark.parametrize(
    ("value_s", "text"), [(None, "-"), (0.0, "0 us"), (5e-5, "50 us"), (0.0123, "12.3 ms"), (2.0, "2.00 s")]
)
def test_durations_read_well(value_s: float | None, text: str) -> None:
    assert duration(value_s) == text


@pytest.mark.parametrize(
    ("run", "policies"),
    [(dropped_run(), ("recompute", "drop")), (ReplayRun([], [], False, 0.0, 0), ("recompute",))],
    ids=["drop", "nothing"],
)
def test_figure_is_drawn(run: ReplayRun, policies: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_result(bench_result(run, *policies), tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_grey_is_the_time_with_groups_of_several_members() -> None:
    assert merged_spans(policy_result(bursty_run(), "drop")) == []
    assert merged_spans(policy_result(dropped_run(), "drop")) == [(26.8, 52.0, "2+1")]
    unfinished = dropped_run()
    unfinished.samples = [s for s in unfinished.samples if s.at_s < 40]
    unfinished.transitions = []
    assert merged_spans(policy_result(unfinished, "drop")) == [(27.0, 78.0, "2+1")]


def test_a_second_merge_begins_another_span() -> None:
    run = bursty_run()
    run.samples = [
        replace(s, epoch=int(s.at_s >= 10), group_sizes=(2, 1) if s.at_s < 10 else (3,)) for s in run.samples
    ]
    assert merged_spans(policy_result(run, "drop")) == [(0.0, 10.0, "2+1"), (10.0, 78.0, "3")]


def test_figure_errors_are_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"figure\.xyz"):
        plot_result(bench_result(bursty_run()), tmp_path / "figure.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'ballast-serve\[bench\]'"):
        plot_result(bench_result(bursty_run()), tmp_path / "figure.png")


def test_bench_without_matplotlib_or_torch_imports() -> None:
    import subprocess

    code = "import sys, tools.bench.command, tools.bench.plot\n"
    code += "assert not {'matplotlib', 'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_progress_on_a_terminal_and_in_a_log() -> None:
    progress = ReplayProgress(
        total_count=300, span_s=75, elapsed_s=12, sent_count=40, finished_count=30, refused_count=2
    )
    assert describe(progress) == "8 running · 2 refused · 0 tokens · 12 s · 63 s left"
    log = io.StringIO()
    with ProgressDisplay(Console(file=log, width=120)) as display:
        for elapsed_s in range(25):
            progress.elapsed_s = elapsed_s
            display(progress)
    assert log.getvalue().count("32/300") == 2
    terminal = io.StringIO()
    with ProgressDisplay(Console(file=terminal, width=120, force_terminal=True)) as display:
        display(progress)
    assert "32/300" in terminal.getvalue()


def _parse(*arguments: str) -> argparse.Namespace:
    return build_parser("bench").parse_args(["bench", "replay", *arguments])


def test_a_model_is_for_a_cluster_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse("--trace", "t.csv", "--address", "127.0.0.1:1", "--model", "m")
    assert "--model: not allowed with argument --address" in capsys.readouterr().err


def test_command_names_the_trace_that_is_missing() -> None:
    args = _parse("--trace", "/nowhere/t.csv", "--address", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"/nowhere/t\.csv"):
        args.run(args)
