"""`python -m tests.clients [CLIENT ...]`: runs third-party clients, unmodified, against a cluster with a gateway.

Each client has its own virtual environment below --venvs, created with `uv` or pip if missing. With --write, the rows
of the tested clients in the table of docs/openai.md are replaced.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clients.checks import CHECKS
from tests.support.cluster import running_cluster
from tools.model.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "openai.md"
BEGIN, END = "<!-- begin clients: written by `python -m tests.clients --write` -->", "<!-- end clients -->"
# Client -> packages to install; the version of the first one is reported.
PACKAGES: Mapping[str, Sequence[str]] = {
    "openai": ("openai", "pydantic"),
    "anthropic": ("anthropic",),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]",),
    "instructor": ("instructor",),
    "litellm": ("litellm",),
    "langchain-openai": ("langchain-openai",),
    "llama-index": ("llama-index-llms-openai-like",),
    "llm": ("llm",),
    "lm-eval": ("lm-eval[api]", "transformers"),
    "guidellm": ("guidellm",),
    "aider": ("aider-chat",),
    "mini-swe-agent": ("mini-swe-agent",),
    "curl": (),
    "chromium": (),
}
FLAGS = {"gateway": ["--allowed-origins", "*"]}
_CHECK_S, _INSTALL_S = 600.0, 1200.0
_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


def python_of(client: str, venvs: Path) -> Path:
    """The Python interpreter of a client's virtual environment, which is created if missing.

    Raises:
        subprocess.CalledProcessError: the packages cannot be installed.
    """
    python = venvs / client / "bin" / "python"
    if not PACKAGES[client]:
        return Path(sys.executable)
    if not python.exists():
        if uv := shutil.which("uv"):
            run([uv, "venv", "-q", str(venvs / client)])
            run([uv, "pip", "install", "-q", "--python", str(python), *PACKAGES[client]])
        else:
            run([sys.executable, "-m", "venv", str(venvs / client)])
            run([str(python), "-m", "pip", "install", "-q", *PACKAGES[client]])
    return python


def run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, timeout=_INSTALL_S)


def version_of(client: str, python: Path) -> str:
    if not PACKAGES[client]:
        said = subprocess.run([client, "--version"], capture_output=True, check=True, text=True)
        return said.stdout.split()[1]
    name = re.split(r"\[", PACKAGES[client][0])[0]
    said = subprocess.run([str(python), "-c", _VERSION, name], capture_output=True, check=True, text=True)
    return said.stdout.strip()


def results_of(client: str, python: Path, base: str, folder: Path) -> list[dict[str, Any]]:
    """The results of all the client's checks; checks that were not reached count as failed."""
    command = [str(python), "-I", str(Path(__file__).with_name("checks.py")), client, base, str(folder)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_CHECK_S, check=False)
    found = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]
    names = [check.__name__.replace("_", " ") for check in CHECKS[client]][len(found) :]
    return found + [{"check": name, "passed": False, "what": said.stderr[-300:]} for name in names]


def table_rows(client: str, version: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    def cell(result: Mapping[str, Any]) -> str:
        what = " ".join(str(result["what"]).split()).replace("|", "\\|")[:110]
        return what if result["passed"] else f"**failed**: {what}"

    return [f"| {client} {version} | {result['check']} | {cell(result)} |" for result in results]


def written(page: str, rows: Mapping[str, Sequence[str]]) -> str:
    """The page with these rows inserted; the rows of other clients are unchanged."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    kept: dict[str, list[str]] = {}
    for line in old.splitlines():
        if (found := re.match(r"\| ([a-z][a-z-]*) [^|]*\|", line)) and found[1] in PACKAGES:
            kept.setdefault(found[1], []).append(line)
    lines = [line for client in PACKAGES for line in rows.get(client, kept.get(client, []))]
    table = ["| client | what it did | what it got |", "|---|---|---|", *lines]
    return f"{before}{BEGIN}\n{chr(10).join(table)}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--venvs", type=Path, default=ROOT / "out" / "clients", help="folder for their environments")
    parser.add_argument("--write", action="store_true", help="write the results into the table of docs/openai.md")
    arguments = parser.parse_args()
    rows: dict[str, list[str]] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(make_tiny("qwen2", Path(folder) / "tiny", hidden=128, vocab=2048, max_len=8192))
        with running_cluster(model, workers=1, gateways=1, device_memory_bytes=96 << 20, flags=FLAGS) as running:
            [base] = running.cluster.http_urls
            for client in arguments.clients or PACKAGES:
                try:
                    python = python_of(client, arguments.venvs)
                    version = version_of(client, python)
                except (subprocess.SubprocessError, OSError) as error:
                    print(f"{client}: cannot be installed: {error}", flush=True)
                    failed += 1
                    continue
                results = results_of(client, python, base, model)
                failed += sum(not result["passed"] for result in results)
                rows[client] = table_rows(client, version, results)
                print("\n".join(rows[client]), flush=True)
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(), rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
