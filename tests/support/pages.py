"""Reruns the commands of documentation pages, and compares their output with the page or updates the page.

A block ```sh is pasted into a shell; a ```text block right after it shows the output, or its end if the first line is
`...`. `ballast up` keeps running for the following blocks. To update pages, in a checkout with its .venv activated:

    python -m tests.support.pages README.md docs/first-cluster.md
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"```(sh|python)\n(.*?)```\n(?:```text\n(.*?)```\n)?", re.DOTALL)
_READY_WITHIN_S, _COMMAND_WITHIN_S = 180.0, 300.0
_COLUMNS = "118"
_ELISION = "..."

# Output that differs between runs, and its placeholder. The order matters.
_SHAPES = (
    (re.compile(r"\(logs: [^)]*\)"), "(logs: PATH)"),
    (re.compile(r"\(join: [^)]*\)"), "(join: WHO)"),  # workers may join one by one or together
    (re.compile(r"\b(sdk|cmpl|chatcmpl|req)-[0-9a-z-]+"), "ID"),
    (re.compile(r"\d[\d,.]* ?(h|min|s|ms|us)\b( \d+ (min|s)\b)?"), "TIME"),
    (re.compile(r"[+-]?\d[\d,.]* ?[KMGT]?i?B\b"), "SIZE"),
    (re.compile(r"\d+(\.\d+)+:\d+|127\.0\.0\.1"), "ADDRESS"),
    (re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]\d+)?"), "#"),
    (re.compile(r"[█▏▎▍▌▋▊▉░]+"), "BAR"),
    (re.compile(r"[─━═]+"), "-"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A command to paste and its expected output; None if the page shows none."""

    language: str
    source: str
    printed: str | None


def steps(page: Path) -> list[Step]:
    return [Step(*found.groups()) for found in _BLOCK.finditer(page.read_text())]


def shape(text: str) -> list[str]:
    """The lines of an output, with everything that differs between runs replaced by placeholders."""
    lines: list[str] = []
    for line in text.splitlines():
        for pattern, name in _SHAPES:
            line = pattern.sub(name, line)
        if line.strip():
            lines.append(line.strip())
    return lines


def differs(printed: str, expected: str) -> str:
    """The first difference in shape between two outputs, or ""."""
    have, want = shape(printed), shape(expected)
    if want[:1] == [_ELISION]:
        have, want = have[-(len(want) - 1) :], want[1:]
    for number, (got, wanted) in enumerate(zip(have, want, strict=False)):
        if got != wanted:
            return f"line {number + 1} should be like {wanted!r}, not {got!r}:\n{printed}"
    return "" if len(have) == len(want) else f"{len(want)} lines were expected:\n{printed}"


class Session:
    """Runs steps one after another. Processes that they start end with the session."""

    def __init__(self, up_flags: str, environ: Mapping[str, str]) -> None:
        self._up_flags = up_flags
        self._environ = {**os.environ, "COLUMNS": _COLUMNS, **environ}
        self._environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._up: subprocess.Popen[str] | None = None
        self._started = "", ""  # the command of `_up`, and its output
        self._http = "http://127.0.0.1:8000"

    def run(self, step: Step) -> str:
        """Runs a step; returns its output, or fails if its exit status is not 0."""
        if step.source.startswith("ballast up"):
            return self._start(step.source)
        source = step.source.replace("http://127.0.0.1:8000", self._http)
        command = ["sh", "-ec", source] if step.language == "sh" else [sys.executable, "-c", source]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_COMMAND_WITHIN_S,
        )
        assert done.returncode == 0, f"{step.source}\nended with {done.returncode}:\n{done.stdout}"
        return done.stdout.rstrip() + "\n"

    def _start(self, source: str) -> str:
        """Starts `ballast up` unless the same command already runs. Returns its output until it is ready."""
        if self._up is not None and self._started[0] == source:
            return self._started[1]
        self.stop()
        command = f"{source.strip()} {self._up_flags}"
        self._up = subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=ROOT,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._up.stdout is not None
        printed = ""
        for line in self._up.stdout:
            printed += line
            if found := re.match(r"ready: .* at (https?://[\d.:]+)/v1, gRPC at ([\d.:]+)", line):
                self._http, self._environ["BALLAST_ADDRESS"] = found[1], found[2]
                self._started = source, printed
                return printed
        raise AssertionError(f"{command} did not become ready:\n{printed}")

    def stop(self) -> None:
        if self._up is not None:
            self._up.terminate()
            self._up.communicate(timeout=_READY_WITHIN_S)
            self._up = None


@contextlib.contextmanager
def session(up_flags: str = "", environ: Mapping[str, str] = MappingProxyType({})) -> Generator[Session]:
    """`up_flags`: additional flags for `ballast up`, to use other ports than the page."""
    running = Session(up_flags, environ)
    try:
        yield running
    finally:
        running.stop()


def write(page: Path) -> None:
    """Replaces the outputs in the page by those of its commands, run here and now."""

    def told(found: re.Match[str]) -> str:
        step = Step(*found.groups())
        if step.printed is None:
            return found[0]
        printed = "".join(f"{line.rstrip()}\n" for line in running.run(step).splitlines())
        if step.printed.startswith(f"{_ELISION}\n"):
            shown = printed.splitlines(keepends=True)[1 - step.printed.count("\n") :]
            printed = "".join([f"{_ELISION}\n", *shown])
        return f"```{step.language}\n{step.source}```\n```text\n{printed}```\n"

    with session() as running:
        page.write_text(_BLOCK.sub(told, page.read_text()))


def links(page: Path) -> Iterator[str]:
    """The page's relative link targets."""
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            yield target


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
