"""Starts and drives `peer` processes."""

import json
import select
import signal
import subprocess
import sys
from typing import Any

CONFIG: dict[str, Any] = {"keepalive_s": 0.2, "silence_timeout_s": 20.0}


class PeerProcess:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.worker.transport.peer"],
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

    def end(self, timeout_s: float = 60.0) -> Any:
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

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._to.close()
        self._from.close()
