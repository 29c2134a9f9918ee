"""Generates ballastpb/ from protos/. `python protos/generate.py [OUT]`; OUT is the repository root by default.

The path under protos/ equals the Python path, so protoc's output imports without rewriting.
"""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
HEADER = '"""Generated from protos/ by `make proto`. Never edited."""\n'


def generate(out: Path) -> None:
    sources = sorted((ROOT / "protos").rglob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={ROOT / 'protos'}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        # Beside this interpreter: its environment need not be on the PATH.
        *(f"--plugin={plugin}={Path(sys.executable).parent / plugin}" for plugin in PLUGINS),
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        *map(str, sources),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; its message stands above")
    package = out / "ballastpb"
    for folder in [package, *sorted(p for p in package.rglob("*") if p.is_dir() and p.name != "__pycache__")]:
        (folder / "__init__.py").write_text(HEADER)
    (package / "py.typed").touch()


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
