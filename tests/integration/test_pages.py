"""The documentation's pages show the actual output of their commands, and the examples work as described."""

import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import browser_window, find_browser
from tests.support.cluster import RunningCluster
from tests.support.pages import ROOT, Session, Step, differs, session, steps

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def shell() -> Iterator[Session]:
    with session("--port 0") as running:
        yield running


@pytest.mark.parametrize("page", ["docs/first-cluster.md", "README.md"])  # the first page needs a new cluster
def test_a_page_shows_the_output_of_its_commands(page: str, shell: Session) -> None:
    told = [step for step in steps(ROOT / page) if step.printed is not None]
    assert len(told) >= 5
    for step in told:
        assert step.printed is not None
        why = differs(shell.run(step), step.printed)
        assert not why, f"{page}: {step.source}: {why}\nto update it: python -m tests.support.pages {page}"


@pytest.mark.parametrize("page", ["docs/gpu.md", "docs/operate.md"])
def test_drop_commands_of_a_page_work_on_an_idle_cluster(page: str, shell: Session) -> None:
    commands = set(re.findall(r"ballast drop --workers [^`\n&|]*[^`\n&| ]", (ROOT / page).read_text()))
    assert commands
    assert not re.search(r"ballast drop(?! --(workers|bytes)) *(--hold|&&|`)", (ROOT / page).read_text())
    shell.run(next(step for step in steps(ROOT / "docs/first-cluster.md") if step.source.startswith("ballast up")))
    for command in commands:
        said = shell.run(Step("sh", f"{command} && ballast restore\n", None))
        assert said.count("done") >= 2, said


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("took 1.5 s, 3 MiB", "took 900 ms, 20.5 GiB", True),
        ("a\nb\nc", "...\nb\nc", True),
        ("a\nb\nc", "...\na\nc", False),
        ("a\nb", "a", False),
        ("a", "a\nb", False),
        ("ready: 2 workers", "ready: 2 wokers", False),
    ],
)
def test_outputs_are_compared_by_their_shape(printed: str, expected: str, same: bool) -> None:
    assert (not differs(printed, expected)) is same


# ---------------------------------------------------------------- examples


def run(with_a_gateway: RunningCluster, *command: str, status: int = 0) -> str:
    environ = {
        **os.environ,
        "BALLAST_ADDRESS": with_a_gateway.cluster.address,
        "OPENAI_BASE_URL": with_a_gateway.cluster.http_urls[0],
    }
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_example_is_tested_and_explains_how_to_run_it() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    here = Path(__file__).read_text() + (Path(__file__).parent / "test_jobs.py").read_text()  # runs those with jobs
    for file in EXAMPLES.iterdir():
        if file.suffix in (".py", ".sh", ".yaml"):
            assert f"examples/{file.name}" in file.read_text()[:800], f"{file.name}: does not say how it is run"
            assert f"../examples/{file.name}" in page
            assert file.name in here


def test_stream(with_a_gateway: RunningCluster) -> None:
    said = run(with_a_gateway, sys.executable, "examples/stream.py", "A ship")
    assert "tokens in" in said
    assert "the first one after" in said


def test_openai_client(with_a_gateway: RunningCluster) -> None:
    assert " tokens\n" in run(with_a_gateway, sys.executable, "examples/openai_client.py")


def test_tools_and_schema(with_a_gateway: RunningCluster) -> None:
    said = run(with_a_gateway, sys.executable, "examples/tools_and_schema.py")
    assert "schema: Ship(name=" in said
    assert "tool: weather({'days': " in said


def test_curl(with_a_gateway: RunningCluster) -> None:
    said = run(with_a_gateway, "sh", "examples/curl.sh")
    assert "data: [DONE]" in said
    assert '"param":"temperature"' in said


def simulated(*flags: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tools.cli.main",
        "sim",
        "--scenario",
        "examples/policies.yaml",
        "--json",
        "-",
        *flags,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["policies"]


@pytest.mark.rotating
def test_policies() -> None:
    assert list(simulated()) == ["recompute", "swap", "static-pipeline", "drop", "drop:restore=off"]


@pytest.mark.parametrize("seed", [0, 1, 111])
def test_the_example_of_policies_shows_that_a_drop_helps(seed: int) -> None:
    """With two of these seeds, a restore under load once delayed other requests by seconds."""
    drawn = simulated("--policy", "recompute,drop", "--seed", str(seed))
    assert drawn["drop"]["ttft_s"]["p99"] < 0.5 < drawn["recompute"]["ttft_s"]["p99"]


# ---------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=180)
    return folder


@pytest.mark.skipif(find_browser() is None, reason="Chromium and chromedriver are not installed")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_site_fits_the_screen_and_loads_nothing_from_other_hosts(width: int, site: Path) -> None:
    serve = functools.partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        with browser_window(width) as browser:
            for page in ("", "first-cluster/", "configure/", "metrics/", "architecture/"):
                browser.open(url + page)
                browser.until("document.readyState === 'complete'")
                asked = browser.run("return performance.getEntriesByType('resource').map(one => one.name)")
                assert asked
                assert [one for one in asked if not one.startswith(url)] == []
                over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert browser.run(f"return {over}") <= 0, page
                assert browser.errors() == []
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
