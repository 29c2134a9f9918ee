import subprocess
import sys

import pytest


@pytest.mark.rotating
def test_every_stage_role_keeps_to_its_device_whatever_its_link_gave() -> None:
    """Runs in its own process, since torch supports only one custom device per process and cannot unregister it."""
    command = [sys.executable, "-m", "tests.unit.worker.engine.fake_device"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
