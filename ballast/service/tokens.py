"""Clients' tokens: a file with a line NAME ROLE sha256:HEX [CLASS,...] per token. It has hashes of tokens only.

Tokens are 256 random bits, so a plain hash does not reveal them. Lines that begin with # are comments.
"""

import asyncio
import base64
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ballast.common.errors import ConfigError
from ballast.common.sampling import ALL_CLASSES, PriorityClass
from ballast.service.logs import get_logger

_PREFIX = "blst_"
_HASH = "sha256:"
_LOOK_S = 1.0
_MAX_FILE_BYTES = 4 << 20


class TokenRole(StrEnum):
    INFER = "infer"  # permits generating, and cancelling own requests
    OPERATE = "operate"  # permits everything


@dataclass(frozen=True, slots=True)
class Token:
    name: str
    role: TokenRole
    digest: str  # SHA-256 of the token, hexadecimal
    classes: frozenset[PriorityClass] = ALL_CLASSES  # priority classes that requests with this token may have


def new_token() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def cluster_token(secret: bytes) -> str:
    """The operator's token of the cluster's own processes. It is derived from the cluster secret and needs no line in
    the file.
    """
    return _PREFIX + base64.urlsafe_b64encode(hmac.digest(secret, b"ballast operate token", "sha256")).decode()


def read_tokens(path: Path) -> dict[str, Token]:
    """Read a token file. Returns its tokens, keyed by their names.

    Raises:
        ConfigError: the file cannot be read, or a line is invalid; the message names the line.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(str(path), f"is larger than {_MAX_FILE_BYTES} bytes")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no text"
        raise ConfigError(str(path), f"cannot be read: {why}; `ballast tokens add` makes it") from error
    tokens: dict[str, Token] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        token = _parse(line)
        if token is None or token.name in tokens:
            raise ConfigError(f"{path}:{number}", f"must be NAME ROLE {_HASH}HEX [CLASS,...], each name once")
        tokens[token.name] = token
    return tokens


def _parse(line: str) -> Token | None:
    match line.split():
        case [name, role, digest, *classes] if role in list(TokenRole) and digest.startswith(_HASH):
            digest = digest.removeprefix(_HASH).lower()
            is_hex = len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)
            may_use = frozenset(classes[0].split(",")) if classes else ALL_CLASSES
            if not is_hex or len(classes) > 1 or not may_use <= ALL_CLASSES:
                return None
            return Token(name, TokenRole(role), digest, frozenset(map(PriorityClass, may_use)))
        case _:
            return None


def write_tokens(path: Path, tokens: Iterable[Token]) -> None:
    """Write a file of tokens atomically, readable by its owner only. Raises ConfigError if it cannot be written."""
    body = "".join(f"{token.name} {token.role} {_HASH}{token.digest}{_classes_of(token)}\n" for token in tokens)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(body)
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error.strerror}") from error


def _classes_of(token: Token) -> str:
    return "" if token.classes == ALL_CLASSES else f" {','.join(sorted(token.classes))}"


class TokenBook:
    """The valid tokens: those of a file, reloaded when it changes, and `cluster`, the one of `cluster_token`."""

    def __init__(self, path: Path, cluster: str | None = None) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._path = path
        self._own = {} if cluster is None else {digest_of(cluster): Token("cluster", TokenRole.OPERATE, "")}
        self._by_digest: Mapping[str, Token] = {}
        self._stamp = self._stamp_now()
        self._take(read_tokens(path))

    def find(self, token: str) -> Token | None:
        return self._by_digest.get(digest_of(token))

    async def follow(self) -> None:
        """Reload the file whenever it changes, until cancelled. If the new file is unreadable or invalid, log an error
        and keep the previous tokens.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            stamp = await asyncio.to_thread(self._stamp_now)
            if stamp == self._stamp:
                continue
            self._stamp = stamp
            try:
                tokens = await asyncio.to_thread(read_tokens, self._path)
            except ConfigError as error:
                get_logger().error("tokens stay as they were", path=error.path, why=error.why)
            else:
                self._take(tokens)
                get_logger().info("tokens read", path=str(self._path), count=len(tokens))

    def _take(self, tokens: Mapping[str, Token]) -> None:
        self._by_digest = {token.digest: token for token in tokens.values()} | self._own

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
