"""Run once more, one by one, the tests that the last run left as failed.

    python -m tests.support.again

Integration tests share two cores with their own clusters and with whatever else runs on the machine, so one may miss
its deadline. A second failure, more than `MOST` tests, or a run that ended without naming any is a failure. A test
that passes only now is named in the output: that is a defect of the test or of the code, and has to be mended.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 1 <= len(failed) <= MOST:
        print(f"{len(failed)} tests are known to have failed; 1 to {MOST} are run again")
        return 1
    print("failed once, run again alone:", *failed, sep="\n  ")
    code = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "not slow and not gpu", *failed], check=False
    ).returncode
    if code == 0:
        print("passed only when run again (to be mended):", *failed, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main())
