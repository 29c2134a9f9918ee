"""Documentation pages are up to date, build without a warning, and are true where a program can check it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ballast.service.settings import Settings, load_settings
from services.dispatcher.config import DispatcherSettings
from services.gateway.config import GatewaySettings
from services.jobs.config import JobsSettings
from services.monitor.config import MonitorSettings
from services.planner.config import PlannerSettings
from services.worker.config import WorkerSettings
from tests.support.pages import ROOT, links
from tools.cli.main import build_parser
from tools.cli.up import _Up

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])
SERVICES: tuple[type[Settings], ...] = (
    DispatcherSettings,
    GatewaySettings,
    JobsSettings,
    MonitorSettings,
    PlannerSettings,
    WorkerSettings,
)


def test_generated_pages_are_up_to_date(tmp_path: Path) -> None:
    # In a separate process, because modules that other tests import register metrics.
    subprocess.run([sys.executable, str(DOCS / "generate.py"), str(tmp_path)], check=True, timeout=120)
    for name in ("configure.md", "metrics.md", "transitions.md"):
        assert (DOCS / name).read_text() == (tmp_path / name).read_text(), "run `make pages`"


def test_every_setting_is_on_the_page() -> None:
    page = (DOCS / "configure.md").read_text()
    for settings in SERVICES:
        section = page.partition(f"## {settings.service.capitalize()}\n")[2].partition("\n## ")[0]
        shared = page.partition("\n## Gateway")[0]
        for path, field in settings.model_fields.items():
            flag = f"`--{path.replace('_', '-')}`"
            if path in settings.developer:
                assert f"| {settings.service} | `{path}` |" in page
            else:
                assert flag in section or flag in shared, flag
            assert field.description, flag
    assert len(re.findall(r"^\| `--", page, re.MULTILINE)) <= 113, (
        "list settings that no operator chooses in `developer`"
    )


def test_worker_flags_on_the_page_on_gpus_are_flags_of_up() -> None:
    page = (DOCS / "gpu.md").read_text()
    flags = {f"--{name.replace('_', '-')}" for name in WorkerSettings.model_fields} - {"--model"}
    given = {
        "--device": "cuda:1",
        "--tensor-parallel-size": "2",
        "--device-memory-bytes": "8GiB",
        "--gpu-memory-utilization": "0.5",
        "--attention-backend": "flashinfer",
        "--transport": "nccl",
        "--enforce-eager": None,
    }
    assert given.keys() == flags & set(re.findall(r"--[a-z-]+", page))
    parts = [part for flag, value in given.items() for part in (flag, value) if part is not None]
    args = build_parser("up").parse_args(["up", *parts])
    handed_on = _Up(args).service_flags()["worker"]
    told, expected = (load_settings(WorkerSettings, ["--model", "x", *f], {}) for f in (handed_on, parts))
    assert told == expected
    assert told.enforce_eager
    assert told.model_fields_set >= {flag[2:].replace("-", "_") for flag in given}


@pytest.mark.parametrize("page", ["configure.md", "operate.md"])
def test_configurations_on_pages_are_valid(page: str, tmp_path: Path) -> None:
    texts = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert texts
    for text in texts:
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        for settings in SERVICES:
            if settings.service in yaml.safe_load(text):
                load_settings(settings, ["--config", str(file)], {})


def test_the_readme_is_short_and_begins_with_the_picture() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert re.match(r"!\[.+\]\(docs/pictures/.+\.png\)", lines[2])


def test_the_readme_counts_model_types_as_the_page_of_models_does() -> None:
    counts = re.search(r"(\d+) of (\d+) model types", " ".join((ROOT / "README.md").read_text().split()))
    assert counts is not None
    page = (DOCS / "your-model.md").read_text()
    assert f"{counts[1]} equal" in page
    assert f"{counts[2]} of the " in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_existing_targets(page: Path) -> None:
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


def test_the_site_builds_without_a_warning_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert "How many GPUs" in page
    for file in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|img|link rel=\"(?:stylesheet|icon|preconnect)\")[^>]*(?:src|href)=\"([^\"]+)", file.read_text()
        )
        assert [url for url in fetched if "//" in url] == [], file


def _code(*folders: str) -> str:
    return "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_the_page_of_metrics_has_each_metric_that_the_code_defines() -> None:
    sources = _code("ballast", "services")
    defined = r"(?:Family|Counter|Gauge|Histogram)\(\s*\"(ballast_[a-z0-9_]+)\""
    names, page = set(re.findall(defined, sources)), (DOCS / "metrics.md").read_text()
    assert len(names) > 60
    assert [name for name in names if f"`{name}`" not in page and f"`{name}_total`" not in page] == []


def test_messages_on_the_troubleshooting_page_occur_in_the_code() -> None:
    sources = _code("ballast", "services", "tools")
    told = [row.split("|")[1] for row in (DOCS / "troubleshoot.md").read_text().splitlines() if row.startswith("| `")]
    for message in [quoted for cell in told for quoted in re.findall(r"`([^`]+)`", cell)]:
        parts = [part.strip() for part in re.split(r"\.\.\.|\b[A-Z]\b|127\.0\.0\.1:\d+|rich: pip.*", message)]
        missing = [part for part in parts if part and part not in sources]
        assert not missing, message


def test_the_changelog_is_short() -> None:
    for version in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        entries = [re.split(r"\n\n|\n#", entry)[0] for entry in version.split("\n- ")[1:]]
        assert len(version.split()) <= 2000, "edit an unreleased entry instead of adding one"
        assert [entry for entry in entries if len(entry.split()) > 60] == []


def test_the_architecture_page_is_short_and_its_paths_exist() -> None:
    page = (DOCS / "architecture.md").read_text()
    assert len(page.split()) <= 2850
    assert max(len(cell) for row in page.splitlines() if row[:1] == "|" for cell in row.split("|")) <= 260
    sources = {path.name for folder in ("services", "sim", "ballast") for path in (ROOT / folder).rglob("*.py")}
    for name in re.findall(r"`([\w.{},/-]+)`", page):
        if name.endswith(".py") and "/" not in name:
            assert name in sources, name
        elif "/" in name and name not in ("core/", "policy/", "shell/"):
            before, _, rest = name.partition("{")
            middle, _, after = rest.partition("}")
            for one in middle.split(","):
                assert (ROOT / f"{before}{one}{after}").exists(), name


def test_targets_of_the_architecture_page_exist() -> None:
    table = (DOCS / "architecture.md").read_text().partition("## Where do I change ...?")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if re.match(r"\d\.|\| (?!question)", row)]
    assert len(rows) > 15
    for row in rows:
        quoted = re.findall(r"`([^`]+)`", row)
        paths = [ROOT / name for name in quoted if "/" in name]
        assert [path for path in paths if not path.exists()] == [], row
        text = "".join(
            path.read_text() for path in paths if path.suffix == ".py" and ROOT / "tests" not in path.parents
        )
        names = [name for name in quoted if re.fullmatch(r"[A-Za-z_]+", name)]
        assert names or row[0] != "|", f"no function is named: {row}"
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == [], row
