"""Starts and drives processes that run `peer`."""

import json
import select
import signal
import subprocess
import sys
import time
from typing import Any

import psutil

# On a busy machine a chunk may take long, so all timeouts are long.
CONFIG: dict[str, Any] = {
    "keepalive_s": 0.2,
    "silence_timeout_s": 60.0,
    "send_timeout_s": 60.0,
    "connect_timeout_s": 60.0,
}


class PeerProcess:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.worker.links.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._from = self.process.stdin, self.process.stdout

    def begin(self, do: str, **arguments: Any) -> None:
        self._to.write(json.dumps({"do": do, "with": arguments}) + "\n")
        self._to.flush()

    def end(self, timeout_s: float = 200.0) -> Any:
        if not select.select([self._from], [], [], timeout_s)[0]:
            raise TimeoutError("the peer process does not answer")
        answer = json.loads(self._from.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def call(self, do: str, **arguments: Any) -> Any:
        self.begin(do, **arguments)
        return self.end()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def freeze(self) -> None:
        """Sends SIGSTOP and waits until every thread of the process has stopped."""
        self.signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + 60
        process = psutil.Process(self.process.pid)
        while any(psutil.Process(thread.id).status() != psutil.STATUS_STOPPED for thread in process.threads()):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the peer process does not stop")
            time.sleep(0.01)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self._to.close()
        self._from.close()
