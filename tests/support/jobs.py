"""A jobs store in a folder, lines to put into it, and a gateway in this process."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from ballast.common.errors import Unavailable
from ballast.service.http_client import BrokenCall
from services.jobs.core.batch import JobBatch
from services.jobs.gateways import GatewayAnswer
from services.jobs.runner import Rules, Runner
from services.jobs.store import Store, StoredFile

URL = "/v1/completions"
RULES = Rules(in_flight=8, line_timeout_s=5.0, max_lines=1000, max_line_bytes=10_000, keep_s=1e9, full_pause_s=0.05)
START_S = 1000.0


def line(number: int, **changes: object) -> str:
    given = {"custom_id": f"c{number}", "method": "POST", "url": URL, "body": {"prompt": f"p{number}"}}
    return json.dumps({**given, **changes})


class ScriptedGateway:
    """Answers each prompt with the prompt itself. With probability `fails`, it fails in one of the ways a gateway
    does.
    """

    def __init__(self, seed: int = 0, *, fails: float = 0.0, takes_s: float = 0.0) -> None:
        self.asked: Counter[str] = Counter()
        self.broken_off = 0
        self._draw = random.Random(seed)
        self._fails = fails
        self._takes_s = takes_s

    async def ask(self, url: str, body: bytes) -> GatewayAnswer:
        prompt = json.loads(body)["prompt"]
        self.asked[prompt] += 1
        try:
            await asyncio.sleep(self._takes_s)
        except asyncio.CancelledError:
            self.broken_off += 1
            raise
        if self._draw.random() < self._fails:
            match self._draw.randrange(3):
                case 0:
                    raise Unavailable("gateway")
                case 1:
                    raise BrokenCall("in the middle")
                case _:
                    return GatewayAnswer(503, "r", 0.01, {"error": {}})
        status = 400 if prompt.endswith("3") else 200
        return GatewayAnswer(status, "r", None, {"said": prompt})

    def close(self) -> None:
        """Does nothing."""


def put_file(store: Store, lines: Sequence[str], file_id: str = "file-in", owner: str = "") -> StoredFile:
    upload = store.new_file(file_id, owner, "batch", "in.jsonl", START_S)
    upload.write("".join(f"{one}\n" for one in lines).encode())
    file = upload.commit()
    store.add_file(file)
    return file


def batch(batch_id: str = "batch_1", file_id: str = "file-in", *, window_s: float = 1e6, owner: str = "") -> JobBatch:
    return JobBatch(
        id=batch_id,
        owner=owner,
        url=URL,
        input_file_id=file_id,
        window="1h",
        created_s=START_S,
        expires_s=START_S + window_s,
    )


@contextlib.asynccontextmanager
async def running(
    store: Store, gateway: ScriptedGateway, rules: Rules = RULES, now_s: Callable[[], float] = lambda: START_S
) -> AsyncGenerator[Runner, None]:
    # The runner only calls `ask`, so any object with that method will do.
    runner = Runner(store, gateway, rules, now_s)  # pyright: ignore[reportArgumentType]
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def until(
    runner: Runner,
    holds: Callable[[JobBatch], bool],
    batch_id: str = "batch_1",
    owner: str = "",
    within_s: float = 30.0,
) -> JobBatch:
    async with asyncio.timeout(within_s):
        while True:
            found = await runner.stored(runner.store.batch, batch_id, owner)
            if holds(found):
                return found
            await asyncio.sleep(0.01)


async def ended(runner: Runner, batch_id: str = "batch_1", owner: str = "") -> JobBatch:
    return await until(runner, lambda one: one.has_ended, batch_id, owner)


def results(folder: Path, one: JobBatch) -> dict[str, object]:
    """custom id -> HTTP status or error code. Checks that no line has two results and that files are in line order."""
    found: dict[str, object] = {}
    for file_id in (one.output_file_id, one.error_file_id):
        if file_id is None:
            continue
        numbers: list[int] = []
        for text in (folder / "files" / file_id).read_text().splitlines():
            said = json.loads(text)
            assert said["custom_id"] not in found, f"two results of {said['custom_id']}"
            numbers.append(int(said["custom_id"].removeprefix("c")))
            response = said["response"]
            found[said["custom_id"]] = said["error"]["code"] if response is None else response["status_code"]
            assert response is None or response["body"] == {"said": f"p{numbers[-1]}"}
        assert numbers == sorted(numbers)
    return found


def expected(count: int) -> dict[str, object]:
    return {f"c{i}": 400 if str(i).endswith("3") else 200 for i in range(count)}
