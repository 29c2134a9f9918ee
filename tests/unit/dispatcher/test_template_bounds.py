"""The chat template of an untrusted model cannot produce unbounded text or run without end."""

import json
import time
from pathlib import Path

import pytest

from ballast.common.errors import InvalidRequest
from services.dispatcher.template import ChatTemplate


def rendered(tmp_path: Path, source: str) -> str:
    (tmp_path / "chat_template.jinja").write_text(source)
    return ChatTemplate(tmp_path, json.loads("{}"), {}).render([{"role": "user", "content": "x"}], {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ strftime_now('%Y' * 3000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ 'x'.center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.zfill(width=1000000000) }}",
        "{{ 'x\\ny'|indent(1000000000) }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ [1]|batch(1000000000, 0)|list }}",
        "{{ [1]|tojson(indent=1000000000) }}",
    ],
)
def test_templates_that_would_fill_memory_are_refused_at_once(tmp_path: Path, source: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(InvalidRequest, match="more than"):
        rendered(tmp_path, source)
    assert time.monotonic() - began_s < 1.0


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '%d tokens' % 1000000 }}", "1000000 tokens"),
        ("{{ '{} {:>5}'.format(1000000, 'x') }}", "1000000     x"),
        ("{{ '%05d'|format(1000000) }}", "1000000"),
        ("{{ 'x'.center(5) }}|{{ 'a\\nb'|indent(2) }}", "  x  |a\n  b"),
        ("{{ {'a': 1}|tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ [1, 2, 3]|batch(2)|list }}", "[[1, 2], [3]]"),
        ("{{ 'abcdef'.find('c') + 'x' .split(' ')|length }}", "3"),
    ],
)
def test_usual_templates_are_not_refused(tmp_path: Path, source: str, expected: str) -> None:
    assert rendered(tmp_path, source) == expected
