"""Parts of a page that a program writes: they stand between two marks, and nobody types them."""

from pathlib import Path

from ballast.common.errors import ConfigError


def quote(page: Path, name: str, text: str) -> None:
    """Puts `text` where the page has marks of this name.

    Raises:
        ConfigError: it has none, or cannot be read or written.
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
