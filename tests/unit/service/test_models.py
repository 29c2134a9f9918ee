"""Models by name, from a huggingface_hub cache, while the hub is unreachable."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from ballast.service.models import Name, find_model, hub_name
from tools.cli.main import main
from tools.model.tiny import make_preset

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "ballast-test/tiny-llama"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline cache: models--ORG--NAME with blobs, refs, and a snapshot that consists of links to the blobs."""
    repo = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot, blobs = repo / "snapshots" / COMMIT, repo / "blobs"
    for folder in (snapshot, blobs, repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for file in make_preset("tiny", tmp_path / "made").iterdir():
        (blobs / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


def test_names_are_distinguished_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_name("meta-llama/Llama-3.1-8B") == Name("meta-llama/Llama-3.1-8B")
    assert hub_name("org/name@v1.0") == Name("org/name", "v1.0")
    assert [hub_name(text) for text in ("./org/name", "/a/b", "a/b/c", "name", str(tmp_path))] == [None] * 5
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") is None, "an existing folder takes precedence"


def test_a_name_is_resolved_to_the_snapshot_in_the_cache(cache: Path) -> None:
    for text in (NAME, f"{NAME}@main", f"{NAME}@{COMMIT}"):
        found = find_model(text, weights=True)
        assert found.name == NAME
        assert found.folder == cache / "models--ballast-test--tiny-llama" / "snapshots" / COMMIT
        assert (found.folder / "model.safetensors").is_file()


def test_a_model_missing_from_the_cache_is_reported_with_a_remedy(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"nobody/nothing: is not in the cache .*HF_HUB_OFFLINE=1 forbids downloads"):
        find_model("nobody/nothing", weights=False)
    with pytest.raises(ConfigError, match=r"'no-such-folder' is no folder on this machine, and no name like org/name"):
        find_model("no-such-folder", weights=False)


def test_a_family_that_is_not_supported_is_named_before_any_weights(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = cache / "models--ballast-test--tiny-llama" / "blobs" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["MambaForCausalLM"]}))
    (config.parent / "model.safetensors").unlink()
    assert main(["model", "fetch", NAME]) == 2
    said = capsys.readouterr().err
    assert "MambaForCausalLM" in said
    assert "LlamaForCausalLM for the model_type 'llama'" in said


def test_the_cache_is_listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list"]) == 0
    assert capsys.readouterr().out.startswith(f"{NAME}@{COMMIT[:12]}  ")
    assert main(["model", "list", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert (model["name"], model["revision"], model["has_weights"]) == (NAME, COMMIT, True)
    assert main(["model", "info", NAME]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


def test_services_take_a_name_and_serve_under_it(cache: Path) -> None:
    """Runs the worker's own code in a process that reads the environment, as in a container."""
    code = (
        "from services.worker.found_model import with_model\n"
        "from services.worker.config import WorkerSettings\n"
        f"settings = with_model(WorkerSettings(model='{NAME}'))\n"
        "print(settings.served_model_name, settings.model)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    name, folder = done.stdout.split()
    assert name == NAME
    assert folder.endswith(COMMIT)
