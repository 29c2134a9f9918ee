"""Generated parts of a page: text between two marks, written by programs only."""

from pathlib import Path

from ballast.common.errors import ConfigError


def quoted(page: Path, name: str) -> str:
    """The text between the page's marks of this name; empty without them."""
    begin, end = f"<!-- begin {name}: written by a program -->", f"<!-- end {name} -->"
    return page.read_text().partition(begin)[2].partition(end)[0].strip()


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
            raise ConfigError(str(page), f"has no lines {begin} and {end} around what is to be replaced")
        page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")
    except OSError as error:
        raise ConfigError(str(page), f"cannot be read or written: {error.strerror}") from error
