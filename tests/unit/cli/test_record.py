"""`ballast record` while dispatchers do not answer."""

import argparse
from pathlib import Path

import pytest

from ballast.client import EndedRequest, EndedRequests
from ballast.common.errors import Unavailable
from tools.cli import record


class ScriptedClient:
    """Two dispatchers: "a" has one ended request; "b" does not answer its first `silent_count` polls."""

    addresses = ("a:1", "b:1")

    def __init__(self, clock: list[float], silent_count: int) -> None:
        self._clock = clock
        self._silent_count = silent_count

    def __enter__(self) -> "ScriptedClient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ended_requests(self, address: str, after: int | None = None) -> EndedRequests:
        self._clock[0] += 0.01
        if address == "b:1" and self._silent_count:
            self._silent_count -= 1
            raise Unavailable(address)
        at_s = self._clock[0]
        ended = EndedRequest(arrived_unix_s=at_s, prompt_token_count=7, completion_token_count=3, priority="normal")
        requests = (ended,) if address == "a:1" and after == 0 else ()
        return EndedRequests(requests=requests, last=after is not None, forgotten_count=0, oldest_open_unix_s=None)


@pytest.mark.parametrize(("silent_count", "status", "lasts_s"), [(0, 0, 10), (15, 0, 15), (10**6, 1, 610)])
def test_a_silent_dispatcher_is_waited_for_and_reported(
    silent_count: int,
    status: int,
    lasts_s: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    clock = [1_800_000_000.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(record, "Client", lambda _: ScriptedClient(clock, silent_count))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(record.time, "time", lambda: clock[0])
    monkeypatch.setattr(record.time, "sleep", sleep)
    out = tmp_path / "trace.csv"
    began_s = clock[0]
    assert record.run(argparse.Namespace(address="a:1,b:1", for_s=10.0, out=out)) == status
    assert lasts_s <= clock[0] - began_s < lasts_s + 4
    assert out.read_text().count("\n") == 2, "the other dispatcher's request is recorded"
    err = capsys.readouterr().err
    assert ("b:1 does not answer" in err) == bool(status)
    assert "without a token (refused ones ...) are left out" in err
