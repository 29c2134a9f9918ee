"""Plants secrets and client texts in every cluster and process that tests start, and searches all logs for them, and
for crashes of the interpreter.

Every state server of a test has a user with a password, which is part of the URL that services get. Tokens, cluster
secrets and passwords are recorded when created. Each cluster receives requests with marked prompts before it stops. The
debug-level logs of all child processes are preserved by hard links until the session ends.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest

from ballast.client import AsyncClient
from ballast.common.errors import BallastError
from ballast.common.sampling import SamplingParams
from ballast.service import tokens
from tools.local import secrets as cluster_secrets
from tools.local.cluster import LocalCluster
from tools.local.process import ChildProcess
from tools.local.state_server import PrivateStateServer

PROMPT, STOP, PASSWORD = "diarycanary", "stopcanary", "passwordcanary"
# Token ids that occur in this order nowhere else.
IDS: Final = (411, 422, 433)
_USER: Final = ("--user", "canary", "on", f">{PASSWORD}", "~*", "&*", "+@all")
_SERVICES: Final = ("MONITOR", "PLANNER", "WORKER", "DISPATCHER", "GATEWAY")
DEBUG: Final[Mapping[str, str]] = {f"BALLAST_{service}__LOG_LEVEL": "debug" for service in _SERVICES}
_SECRET_CHARS: Final = 40  # shorter values are ids
_OVERLAP: Final = 256  # overlap of consecutive pieces of a file: longer than any secret
_CRASH: Final = "Fatal Python error"  # printed by faulthandler, by a process that was forked and not executed yet, too
_WORDS: Final = (PROMPT, STOP, PASSWORD, ", ".join(map(str, IDS[:2])), _CRASH)


class Canaries:
    """Plants the secrets and searches the logs for them. `folder` should be on the logs' file system, since it holds
    hard links to them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: set[str] = set()  # randomly generated secrets
        self._log_count = 0

    @contextlib.contextmanager
    def planted(self) -> Generator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ChildProcess, "__init__", self._keeping_logs(ChildProcess.__init__))
            patch.setattr(PrivateStateServer, "__init__", _with_a_password(PrivateStateServer.__init__))
            patch.setattr(PrivateStateServer, "url", property(_url))
            for module, name in (
                (cluster_secrets.secrets, "token_hex"),
                (cluster_secrets.secrets, "token_urlsafe"),
                (tokens, "cluster_token"),
            ):
                patch.setattr(module, name, self._noting(getattr(module, name)))
            yield

    def seen(self) -> list[str]:
        """The secrets and crashes found so far, each with the name of the file that contains it."""
        secrets = [secret.encode() for secret in (*_WORDS, *self._made)]
        found: list[str] = []
        for path in sorted(self._folder.iterdir()):
            shown = {secret for piece in _pieces(path) for secret in secrets if secret in piece}
            found += [f"{secret.decode()!r} in {path.name}" for secret in sorted(shown)]
        return found

    # Any: wrappers have the signatures of the functions that they replace.
    def _keeping_logs(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(child: ChildProcess, name: str, command: Sequence[str], **others: Any) -> None:
            original(child, name, command, **others)
            self._log_count += 1
            with contextlib.suppress(OSError):  # another file system, or the same log after a restart
                os.link(child.log_path, self._folder / f"{self._log_count:05}-{name}.log")

        return init

    def _noting(self, original: Callable[..., str]) -> Callable[..., str]:
        def make(*args: Any) -> str:
            secret = original(*args)
            if len(secret) >= _SECRET_CHARS:
                self._made.add(secret)
            return secret

        return make


def _with_a_password(original: Callable[..., None]) -> Callable[..., None]:
    def init(server: PrivateStateServer, *, flags: Sequence[str] = (), **others: Any) -> None:
        own = "--aclfile" in flags or "--user" in flags
        original(server, flags=flags if own else (*flags, *_USER), **others)

    return init


def _url(server: PrivateStateServer) -> str:
    flags: Sequence[str] = server._flags  # pyright: ignore[reportPrivateUsage]
    user = f"canary:{PASSWORD}@" if _USER[1] in flags else ""
    return f"redis://{user}127.0.0.1:{server.port}/0"


def _pieces(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        before = b""
        while piece := file.read(1 << 20):
            yield before + piece
            before = piece[-_OVERLAP:]


async def ask(cluster: LocalCluster) -> None:
    """Sends valid and invalid requests of every kind with words that must not appear in any log; ignores results."""
    sampling = SamplingParams(max_tokens=4, stop=(STOP,), ignore_eos=True)
    with contextlib.suppress(BallastError, grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout(3.0), AsyncClient(cluster.address, **cluster.credentials) as client:
            asked = [
                client.generate(PROMPT, sampling=sampling, deadline_s=2.0),
                client.generate(token_ids=IDS, sampling=sampling, deadline_s=2.0),
                client.generate(PROMPT * 100_000, sampling=sampling, deadline_s=2.0),  # too long for the model
                client.generate(PROMPT, sampling=SamplingParams(max_tokens=1 << 30, stop=(STOP,)), deadline_s=2.0),
                client.generate(token_ids=(*IDS, 1 << 30), sampling=sampling, deadline_s=2.0),
            ]
            await asyncio.gather(*asked, return_exceptions=True)


@pytest.fixture(scope="session", autouse=True)
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("canaries")  # pytest removes it eventually, however this run ends
    found = Canaries(folder)
    with found.planted():
        yield
    seen = found.seen()
    shutil.rmtree(folder)
    assert not seen, f"logs contain secrets or crashes: {seen[:20]}"
