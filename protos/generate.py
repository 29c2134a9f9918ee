"""Generates ballastpb/ from protos/. `python protos/generate.py [OUT]`; OUT is the repository root by default.

The path under protos/ equals the Python path, so protoc's output imports without rewriting.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
HEADER = '"""Generated from protos/ by `make proto`. Never edited."""\n'


# Generated code runs with the protobuf and grpcio that made it and with newer ones (protobuf: up to the next major
# version). So it is made by old ones, which nobody else here uses: they have a folder of their own.
TOOLS = "grpcio-tools==1.72.2"
TOOLS_FOLDER = Path(sys.prefix) / "share" / TOOLS.replace("==", "-")


def generate(out: Path) -> None:
    if not (TOOLS_FOLDER / "grpc_tools").is_dir():
        install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, "--target", str(TOOLS_FOLDER), TOOLS], check=True, stderr=subprocess.DEVNULL)
    sources = sorted((ROOT / "protos").rglob("*.proto"))
    arguments = [
        f"--proto_path={ROOT / 'protos'}",
        f"--proto_path={TOOLS_FOLDER / 'grpc_tools' / '_proto'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        # Beside this interpreter: its environment need not be on the PATH.
        *(f"--plugin={plugin}={Path(sys.executable).parent / plugin}" for plugin in PLUGINS),
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        *map(str, sources),
    ]
    environ = {**os.environ, "PYTHONPATH": str(TOOLS_FOLDER)}
    done = subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], env=environ, check=False)
    if done.returncode != 0:
        raise SystemExit("protoc failed; its message stands above")
    package = out / "ballastpb"
    for folder in [package, *sorted(p for p in package.rglob("*") if p.is_dir() and p.name != "__pycache__")]:
        (folder / "__init__.py").write_text(HEADER)
    (package / "py.typed").touch()


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
