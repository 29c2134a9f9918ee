"""Checked-in generated code equals freshly generated code."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def contents(package: Path) -> dict[str, str]:
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(package)): path.read_text() for path in files}


def test_protobuf_code_is_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "protos" / "generate.py"), str(tmp_path)], check=True, timeout=60)
    checked_in, generated = contents(ROOT / "ballastpb"), contents(tmp_path / "ballastpb")
    assert sorted(checked_in) == sorted(generated), "run `make proto`"
    stale = [name for name, text in generated.items() if checked_in[name] != text]
    assert stale == [], "run `make proto`"
