"""How far a replay has come: a bar on a terminal, a line now and then elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from ballast.bench.replay import Progress

_LINE_INTERVAL_S = 10.0
_LOG_WIDTH = 120


def open_console() -> Console:
    """Standard output; in a file or pipe wide enough that no line is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=_LOG_WIDTH)


class ProgressDisplay:
    """A context manager that is called with each `Progress`."""

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

    def __call__(self, progress: Progress) -> None:
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


def describe(progress: Progress) -> str:
    parts = [f"{progress.running_count} running"]
    if progress.refused_count:
        parts.append(f"{progress.refused_count} refused")
    if progress.failed_count:
        parts.append(f"{progress.failed_count} failed")
    parts += [f"{progress.token_count:,} tokens", f"{progress.elapsed_s:.0f} s", f"{progress.eta_s:.0f} s left"]
    return " · ".join(parts)
