"""Types of command line arguments, validated before any work begins."""

import argparse
from pathlib import Path

from ballast.common.units import parse_bytes, parse_duration


def size(text: str) -> int:
    """Argument type for bytes: 512MiB, 16GiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def seconds(text: str) -> float:
    """Argument type for a duration: 90s, 10m."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def output_file(text: str) -> Path:
    """Argument type for an output file, or - for standard output. Checks that its folder exists."""
    path = Path(text)
    if text == "-":
        return path
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it first")
    return path


def figure_file(text: str) -> Path:
    """Argument type for a figure: an output file with a suffix that matplotlib supports."""
    path = output_file(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, got {text!r}")
    return path
