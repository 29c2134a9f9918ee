"""The examples of docs/openai.md run as written, one after the other."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import RunningCluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai.md"


def test_every_example_runs(with_a_gateway: RunningCluster, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 4
    names: dict[str, Any] = {"__name__": "example"}
    try:
        for example in examples:
            exec(example.replace("http://127.0.0.1:8000/v1", with_a_gateway.cluster.http_urls[0]), names)
    finally:
        names["ai"].close()
    printed = capsys.readouterr().out
    assert "CompletionUsage(completion_tokens=" in printed
    assert "masts=" in printed
    assert "name='weather'" in printed
