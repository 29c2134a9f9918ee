"""Generated parts of a page: text between two marks, written by programs only."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ballast.common.errors import ConfigError


def quote(page: Path, name: str, text: str) -> None:
    """Replace the text between the page's marks of this name.

    Raises:
        ConfigError: the page does not have these marks, or cannot be read or written.
    """
    begin, end = f"<!-- begin {name}: written by a program -->", f"<!-- end {name} -->"
    try:
        before, found, rest = page.read_text().partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ConfigError(str(page), f"has no lines {begin} and {end} around the text to replace")
        page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")
    except OSError as error:
        raise ConfigError(str(page), f"cannot be read or written: {error.strerror}") from error


def code_commit() -> str:
    """Last commit that changed the code of a simulation, and whether there are uncommitted changes to it."""
    parts = ["ballast", "services", "sim", "tools", "benchmarks", ":!benchmarks/results"]
    last = subprocess.run(["git", "log", "-1", "--format=%h", "--", *parts], capture_output=True, text=True, check=True)
    changed = subprocess.run(["git", "status", "--porcelain", "--", *parts], capture_output=True, text=True, check=True)
    return last.stdout.strip() + (" with changes" if changed.stdout else "")


def quote_run(page: Path, name: str, text: str, *, note: str = "", paths: Sequence[Path | None] = ()) -> None:
    """Quote the result of the running program below its command line and the commit. `paths`: arguments that are
    folders of this machine.

    Raises:
        ConfigError: as `quote`, or the code has uncommitted changes, so that no commit names it.
    """
    commit = code_commit()
    if " " in commit:
        raise ConfigError("--write", f"needs committed code, got {commit}")
    words = ["DIR" if word in map(str, paths) else word for word in sys.argv[1:]]
    command = f"python -m benchmarks.{Path(sys.argv[0]).stem} {' '.join(words)}"
    quote(page, name, f"`{command}`, commit {commit}{note and ', '}{note}:\n\n{text}")
