"""Removes secrets from logs, errors and answers."""

import re
from typing import Final

# Scheme, user and password of a URL, up to the last @ of the word, because passwords may contain an @.
_IN_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s\"']*@", re.IGNORECASE)
_AS_PARAMETER: Final = re.compile(r"([?&](?:password|token|secret)=)[^&\s\"']*", re.IGNORECASE)
_AS_HEADER: Final = re.compile(r"(\bbearer\s+)[^\s\"',]+", re.IGNORECASE)


def redact(text: str) -> str:
    """The text with bearer tokens, and credentials in URLs, replaced by `***`."""
    if "://" in text:
        text = _AS_PARAMETER.sub(r"\1***", _IN_URL.sub(r"\1***@", text))
    return _AS_HEADER.sub(r"\1***", text)
