"""What a cluster shares and nobody else may know: its secret, and its user at the state server."""

import hashlib
import os
import secrets
from pathlib import Path

CLUSTER_SECRET, REDIS_PASSWORD, REDIS_USERS = "cluster.secret", "redis.password", "users.acl"
REDIS_USER = "ballast"

# Whoever has no password may find out that the server lives. The user sees its own keys and channels only, and has no
# command that looks at other clients or changes the server.
_USERS = (
    "user default on nopass resetkeys resetchannels -@all +ping +info\n"
    "user {user} on #{digest} ~ballast:* &ballast:* -@all +@read +@write +@pubsub +@scripting +@transaction"
    " +@connection +time -@dangerous\n"
)


def make_secrets(folder: Path) -> None:
    """Makes what is missing in `folder`. `users.acl` holds a hash only: for the state server's --aclfile.

    Raises:
        OSError: it cannot be written.
    """
    if not (folder / CLUSTER_SECRET).exists():
        write_file(folder / CLUSTER_SECRET, secrets.token_hex(32).encode(), secret=True)
    if not (folder / REDIS_PASSWORD).exists():
        password = secrets.token_urlsafe(32)
        users = _USERS.format(user=REDIS_USER, digest=hashlib.sha256(password.encode()).hexdigest())
        write_file(folder / REDIS_USERS, users.encode())
        write_file(folder / REDIS_PASSWORD, password.encode(), secret=True)


def write_file(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Writes in one piece: a reader meanwhile sees the old file or the new one. `secret`: for its owner only."""
    beside = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o644), "wb") as file:
        file.write(data)
    os.replace(beside, path)
