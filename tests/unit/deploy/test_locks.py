"""Images install the versions of `constraints.txt`, and every file has a hash."""

import re
from pathlib import Path

import pytest

from deploy.docker.requirements import requirements

ROOT = Path(__file__).parents[3]
_NAME = re.compile(r"^([\w.-]+)(?:\[[^\]]*\])?")


@pytest.mark.parametrize(("name", "extras"), [("control", ["gateway", "tls"]), ("worker", ["worker"])])
def test_a_lock_holds_all_requirements_as_they_are_pinned(name: str, extras: list[str]) -> None:
    text = (ROOT / f"deploy/docker/{name}.lock").read_text()
    entries = re.findall(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^[a-z]", text, re.MULTILINE)), "every package needs a hash"
    locked = {package: version for package, version, _ in entries}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert not {p: v for p, v in locked.items() if pins.get(p, v) != v}, "run `make lock`"
    needed = {found[1] for one in requirements(ROOT, extras) if (found := _NAME.match(one))} - {"torch"}
    assert needed <= locked.keys(), "run `make lock`"
