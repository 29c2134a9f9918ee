"""Sizes, durations and layer ranges are formatted as text and parsed back."""

import pytest

from ballast.common.units import counted, human_bytes, layer_ranges, parse_bytes, parse_duration, thousands


def test_numbers_are_readable() -> None:
    assert human_bytes(-1_572_864, signed=True) == "-1.5 MiB"
    assert (human_bytes(0), human_bytes(1023), human_bytes(23 << 30)) == ("0 B", "1023 B", "23.0 GiB")
    assert (thousands(999), thousands(3_100)) == ("999", "3.1k")
    assert (counted(1, "GPU"), counted(2000, "GPU")) == ("1 GPU", "2,000 GPUs")


def test_layers_have_both_ends() -> None:
    assert layer_ranges((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert layer_ranges(()) == ""


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("1000000", 10**6), ("512MiB", 512 << 20), ("1.5 GB", 1.5e9), ("16gib", 16 << 30)]
)
def test_sizes_are_understood(text: str, size_bytes: float) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "lots", "-1", "1 XB", "0", "1e9"])
def test_invalid_sizes_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"16GiB|at least one byte"):
        parse_bytes(text)


def test_times_are_understood() -> None:
    assert [parse_duration(text) for text in ("90", "90s", "10m", "1.5h")] == [90, 90, 600, 5400]
    for text in ("", "0", "ten", "-1s", "1d"):
        with pytest.raises(ValueError, match="10m or 2h"):
            parse_duration(text)
