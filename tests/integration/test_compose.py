"""Runs docker-compose.yml and deploy/kubernetes as local processes. Their checks must pass, and must fail for a wrong
setting.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compose_check(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "deploy.compose_check", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    return done.returncode, done.stdout


@pytest.mark.rotating
def test_the_compose_file_works() -> None:
    status, out = compose_check()
    assert status == 0, out
    assert out.splitlines()[-1] == "compose-check passed: worker=2, dispatcher=2"
    assert out.count("chunks streamed") == 2
    assert "requests by dispatcher: 4, 4" in out
    assert "3 lines of a batch answered" in out


@pytest.mark.rotating
def test_the_profile_of_emulated_workers_works() -> None:
    scale = ("worker=0", "emulated-worker=2", "dispatcher=1")
    status, out = compose_check("--profile", "emulated", *(word for one in scale for word in ("--scale", one)))
    assert status == 0, out
    assert "emulated-worker-2" in out


def test_a_wrong_setting_in_it_is_found(tmp_path: Path) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(text.replace("BALLAST_MONITOR__REDIS_URL", "BALLAST_MONITOR__REDIS_ADDRESS"))
    status, out = compose_check("--file", str(wrong))
    assert status == 1
    assert "redis_address: unknown setting" in out


@pytest.mark.rotating
def test_the_manifests_work() -> None:
    command = [sys.executable, "-m", "deploy.kubernetes_check"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    assert "requests by dispatcher: 4, 4" in done.stdout
    assert "3 lines of a batch answered" in done.stdout
    assert "worker-1 takes nothing new" in done.stdout
