import subprocess
import sys


def test_defects_that_a_gpu_would_reveal_are_detected_without_one() -> None:
    command = [sys.executable, "-m", "tests.support.put_back"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    seen = [line for line in done.stdout.splitlines() if line.endswith(": seen")]
    assert len(seen) == 5, done.stdout
