"""Each promise in docs/promises.md names a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_each_promise_names_an_existing_test() -> None:
    page = (ROOT / "docs" / "promises.md").read_text()
    assert len(page.splitlines()) <= 60
    rows = [row for row in page.splitlines() if row.startswith("| ") and not row.startswith("| promise")]
    assert len(rows) >= 15
    for row in rows:
        named = re.findall(r"`(tests/[^`]+)`", row)
        assert named, f"no test: {row}"
        assert [name for name in named if not (ROOT / name).is_file()] == []
