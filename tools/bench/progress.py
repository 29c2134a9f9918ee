"""Shows the progress of a replay or a comparison: as bars on a terminal, as lines elsewhere."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from tools.bench.replay import ReplayProgress

_LINE_INTERVAL_S = 10.0
_LOG_WIDTH = 120


def open_console(*, stderr: bool = False) -> Console:
    """A console on standard output or standard error. In a file or a pipe, lines wrap at 120 columns instead of 80."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=_LOG_WIDTH, stderr=stderr)


class ProgressDisplay:
    """Shows the progress of a replay within a `with` block; called with each `ReplayProgress`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Bar(
            TextColumn("replay"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=0)
        self._next_line_s = _LINE_INTERVAL_S

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def __call__(self, progress: ReplayProgress) -> None:
        if self._console.is_terminal:
            self._bar.update(
                self._task,
                total=progress.total_count,
                completed=progress.ended_count,
                description=describe(progress),
            )
        elif progress.elapsed_s >= self._next_line_s:
            self._next_line_s = progress.elapsed_s + _LINE_INTERVAL_S
            self._console.print(f"{progress.ended_count}/{progress.total_count}  {describe(progress)}")


def describe(progress: ReplayProgress) -> str:
    parts = [f"{progress.running_count} running"]
    if progress.refused_count:
        parts.append(f"{progress.refused_count} refused")
    if progress.failed_count:
        parts.append(f"{progress.failed_count} failed")
    parts += [f"{progress.token_count:,} tokens", f"{progress.elapsed_s:.0f} s", f"{progress.eta_s:.0f} s left"]
    return " · ".join(parts)


class ComparisonDisplay:
    """Shows the progress of a comparison within a `with` block. `expected_s`: estimated duration of each run, in order.
    Finished runs correct the estimate of the remaining time.
    """

    def __init__(self, console: Console, expected_s: Sequence[float]) -> None:
        self._console = console
        self._expected_s = list(expected_s)
        self._total_s = sum(expected_s)
        self._index = -1
        self._done_s = 0.0  # estimated time of the finished runs
        self._taken_s = 0.0  # real time of the finished runs
        self._began_s = 0.0
        self._title = ""
        self._bar = Bar(
            TextColumn("{task.fields[count]}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[left]} left  {task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=max(self._total_s, 1.0), count="", left="")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    @property
    def left_s(self) -> float:
        """Estimated remaining time in seconds, including the rest of the current run."""
        correction = self._taken_s / self._done_s if self._done_s else 1.0
        running_s = time.monotonic() - self._began_s if self._began_s else 0.0
        return max(0.0, (self._total_s - self._done_s) * correction - running_s)

    def begin(self, title: str) -> None:
        self._index += 1
        self._title = title
        self._began_s = time.monotonic()
        if not self._console.is_terminal:
            self.say(f"run {self._index + 1} of {len(self._expected_s)}, {minutes(self.left_s)} left: {title}")
        self._update("starting", refresh=True)

    def end(self) -> None:
        self._done_s += self._expected_s[self._index]
        self._taken_s += time.monotonic() - self._began_s
        self._began_s = 0.0
        self._update("", refresh=True)

    def on_progress(self, progress: ReplayProgress) -> None:
        self._update(f"{progress.ended_count}/{progress.total_count} requests, {progress.running_count} running")

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def _update(self, what: str, *, refresh: bool = False) -> None:
        if not self._console.is_terminal:
            return
        expected_s = self._expected_s[self._index]
        now_s = min(expected_s, time.monotonic() - self._began_s) if self._began_s else 0.0
        self._bar.update(
            self._task,
            completed=self._done_s + now_s,
            description=f"{self._title}  {what}",
            count=f"run {self._index + 1}/{len(self._expected_s)}",
            left=minutes(self.left_s),
            refresh=refresh,
        )


def minutes(duration_s: float) -> str:
    """Format seconds as minutes: 75 -> '1:15'."""
    return f"{int(duration_s) // 60}:{int(duration_s) % 60:02d}"
