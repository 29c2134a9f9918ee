"""A file of prompts at class batch, beside online traffic: what is answered already is left out when it is run again.

    ballast up                                                       # in another terminal
    python examples/offline_batch.py examples/prompts.jsonl out.jsonl

Each line of the first file is {"id": ..., "prompt": ...}, each of the second {"id": ..., "text": ..., "tokens": ...}.
Interactive requests go first; where the cluster refuses because it is full, the SDK waits as long as it is told to.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import TextIO

from ballast.client import AsyncClient, BallastError

AT_ONCE = 32  # requests under way; the rest waits here and not in the cluster
MAX_TOKENS = 64


def main(source: Path, target: Path) -> int:
    lines = target.read_text().splitlines() if target.exists() else []
    done = {json.loads(line)["id"] for line in lines}
    wanted = [line for line in map(json.loads, source.read_text().splitlines()) if line["id"] not in done]
    with target.open("a") as out:
        failed = asyncio.run(answer_all(wanted, out))
    print(f"{len(wanted) - failed} answered, {failed} failed, {len(done)} were there already")
    return 1 if failed else 0


async def answer_all(wanted: list[dict[str, str]], out: TextIO) -> int:
    """How many had no answer."""
    room = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(overload_retries=10) as client:

        async def answer(line: dict[str, str]) -> int:
            async with room:
                try:
                    # The seed follows from the line: the same file gives the same answers.
                    sampling = {"seed": seed_of(line["id"])}
                    said = await client.generate(line["prompt"], sampling, max_tokens=MAX_TOKENS, priority="batch")
                except BallastError as error:
                    print(f"{line['id']}: {error}", file=sys.stderr)
                    return 1
            told = {"id": line["id"], "text": said.text, "tokens": said.usage.completion_tokens}
            print(json.dumps(told), file=out, flush=True)
            return 0

        return sum(await asyncio.gather(*map(answer, wanted)))


def seed_of(text: str) -> int:
    """Not `hash`, which differs from process to process."""
    return int.from_bytes(text.encode()[:7], "big")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} PROMPTS.jsonl ANSWERS.jsonl")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
