"""Dispatchers of a complete cluster are killed; every kind of request continues, also over HTTP."""

import json
import re
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.cluster import running_cluster
from tools.cli.main import main as ballast
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating


def test_every_kind_of_request_continues(capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy and seeded requests, with logprobs, stop strings and a JSON schema."""
    arguments = ["--for", "20s", "--faults", "kill a dispatcher", "--fault-every-s", "2", "--at-once", "1"]
    assert ballast(["chaos", *arguments]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert re.search(r"kill a dispatcher +[1-9]", said)
    assert "0 lost" in said
    assert "0 answers of" in said


def test_choices_streamed_over_http_continue(tmp_path: Path) -> None:
    """Killing a dispatcher changes no text of four choices of one request, spread over two dispatchers."""
    model = make_tiny("llama", tmp_path / "tiny", max_len=2048)
    wanted = {
        "model": "tiny",
        "prompt": "a ship",
        "max_tokens": 160,
        "seed": 5,
        "n": 4,
        "stream": True,
        "ignore_eos": True,
    }
    flags = ("--dtype", "float64")
    with running_cluster(model, workers=1, dispatchers=2, gateways=1, flags={"worker": flags}) as running:
        cluster = running.cluster

        async def ask(*, kill: bool) -> list[str]:
            texts, killed = [""] * 4, False
            async with (
                httpx.AsyncClient(base_url=cluster.http_urls[0], timeout=120) as http,
                http.stream("POST", "/completions", json=wanted) as response,
            ):
                async for line in response.aiter_lines():
                    body = line.removeprefix("data: ")
                    if not line or body == "[DONE]":
                        continue
                    event = json.loads(body)
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
                    if kill and not killed and all(texts):
                        cluster.kill("dispatcher", 0)
                        killed = True
            assert killed is kill
            return texts

        undisturbed = running.run(ask(kill=False))
        assert len(set(undisturbed)) > 1
        assert running.run(ask(kill=True)) == undisturbed
