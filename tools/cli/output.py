"""Output of commands for programs: one JSON object on standard output (docs/json.md)."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, cast

from ballast.common.layout import Member


def print_json(value: object) -> None:
    """Print a dataclass or plain values as JSON. Unlike in the code, the range of a member's layers includes
    `last_layer`.
    """
    print(json.dumps(plain(value), ensure_ascii=False, indent=2))


def plain(value: object) -> Any:  # Any: JSON values
    if isinstance(value, Member):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain({**fields, "last_layer": value.last_layer - 1})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in cast("tuple[object, ...]", value)]
    return value
