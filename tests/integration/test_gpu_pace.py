"""The page on GPU pace can be generated without a GPU, using a tiny model."""

import subprocess
import sys
from pathlib import Path


def test_the_page_has_every_part(tmp_path: Path) -> None:
    words = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--folder",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "page.md"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_pace", *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    for heading in ("Decodes", "Sampling", "Prompts", "Drop and restore", "Served by two workers of this device"):
        assert f"## {heading}" in page
    assert "| 4 | 64 |" in page
    assert "`ballast drop` under 1 requests: exit 0" in page
    assert "`ballast restore` under 1 requests: exit 0" in page
    assert "- Afterwards, with 4 requests: " in page
