"""Huge pages are requested only for memory that has grown, and its contents stay unchanged."""

import gc
from pathlib import Path

import pytest

from sim import pages
from sim.pages import HugePages

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="there are no huge pages here")
def test_huge_pages_are_requested_where_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_LEAST_BYTES", 1)
    gc.collect()  # garbage of earlier tests would otherwise be freed meanwhile
    huge = HugePages()
    first = b"1" * (160 << 20)  # too large to reuse freed memory
    huge.look()
    assert huge.asked_bytes > 0
    huge.asked_bytes = 0
    huge.look()
    assert huge.asked_bytes == 0  # memory has not grown
    second = b"2" * (160 << 20)
    huge.look()
    assert huge.asked_bytes > 0
    assert first.count(b"1") == second.count(b"2") == 160 << 20


def test_a_small_process_requests_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_LEAST_BYTES", 1 << 50)
    huge = HugePages()
    huge.look()
    assert huge.asked_bytes == 0
