"""Makes the secrets of a cluster: the cluster secret, and the password of its user at the state server."""

import hashlib
import os
import secrets
from pathlib import Path

CLUSTER_SECRET, REDIS_PASSWORD, REDIS_USERS = "cluster.secret", "redis.password", "users.acl"
REDIS_USER = "ballast"

# Users of the state server. Without a password, only PING and INFO are permitted. The cluster's user can access only
# its own keys and channels, and cannot run commands that show other clients or change the server.
_USERS = (
    "user default on nopass resetkeys resetchannels -@all +ping +info\n"
    "user {user} on #{digest} ~ballast:* &ballast:* -@all +@read +@write +@pubsub +@scripting +@transaction"
    " +@connection +time -@dangerous\n"
)


def make_secrets(folder: Path) -> None:
    """Make the missing files in `folder`. `users.acl`, for the state server's --aclfile, contains only a hash.

    Raises:
        OSError: a file cannot be written.
    """
    if not (folder / CLUSTER_SECRET).exists():
        write_file(folder / CLUSTER_SECRET, secrets.token_hex(32).encode(), secret=True)
    if not (folder / REDIS_PASSWORD).exists():
        (folder / REDIS_USERS).unlink(missing_ok=True)  # it would have the hash of another password
        write_file(folder / REDIS_PASSWORD, secrets.token_urlsafe(32).encode(), secret=True)
    if not (folder / REDIS_USERS).exists():
        digest = hashlib.sha256((folder / REDIS_PASSWORD).read_bytes().strip()).hexdigest()
        write_file(folder / REDIS_USERS, _USERS.format(user=REDIS_USER, digest=digest).encode())


def write_file(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Write a file atomically. `secret`: only its owner can read it."""
    beside = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o644), "wb") as file:
        file.write(data)
    os.replace(beside, path)
