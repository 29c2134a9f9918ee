"""A public set of JSON schemas from a package: those of the Kubernetes API (kubernetes-validate).

They were written independently of Ballast and for another purpose: nested up to dozens of levels, some recursive, with
patterns, formats, unions and free-form maps. Referenced definitions are copied into each schema, so that it is
self-contained.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate

# Any: schemas are plain JSON.
Schema = dict[str, Any]
_FOLDER = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local-strict"
_REFERENCE = re.compile(r'"\$ref": "[^"#]*#/\$defs/([^"]+)"')
MAX_CHARS = 200_000  # a dispatcher accepts grammars of up to 256 KiB


@cache
def _definitions() -> dict[str, str]:
    """Name -> schema as JSON text."""
    defined = json.loads((_FOLDER / "_definitions.json").read_text())["$defs"]
    return {name: json.dumps(schema) for name, schema in defined.items()}


@cache
def public_schemas() -> tuple[Schema, ...]:
    """All schemas of at most MAX_CHARS characters, in the order of their file names."""
    texts = [_bundled(path) for path in sorted(_FOLDER.glob("*.json")) if not path.name.startswith(("_", "all"))]
    return tuple(json.loads(text) for text in texts if len(text) <= MAX_CHARS)


def _bundled(path: Path) -> str:
    schema = json.loads(path.read_text())
    wanted, found = set(_REFERENCE.findall(json.dumps(schema))), dict[str, Any]()
    while wanted:
        name = wanted.pop()
        text = _definitions()[name]
        found[name] = json.loads(text)
        wanted |= set(_REFERENCE.findall(text)) - set(found)
    bundled = json.dumps({**schema, "$defs": found} if found else schema)
    return _REFERENCE.sub(r'"$ref": "#/$defs/\1"', bundled)
