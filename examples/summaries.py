"""Summarises many texts as one batch with OpenAI's Python client, and shows the progress. It can be interrupted.

    ballast up --jobs jobs                                           # in another terminal
    python examples/summaries.py examples/prompts.jsonl summaries.jsonl

Each line of the input file is {"id": ..., "prompt": TEXT}, and each line of the output {"id": ..., "text": SUMMARY}.
The cluster stores the batch: started again with the same files, this program finds it and continues to wait.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

from openai import APIConnectionError, InternalServerError, OpenAI
from openai.types import Batch

MAX_TOKENS = 48
ASKED = "Summarise this in one sentence:\n\n"
LOOK_S = 0.5


def main(source: Path, target: Path) -> int:
    with OpenAI() as ai:  # OPENAI_BASE_URL and OPENAI_API_KEY say where, and who
        content = source.read_bytes()
        name = hashlib.sha256(content).hexdigest()[:32]
        batch = found(ai, name) or submitted(ai, content.decode(), name)
        done = awaited(ai, batch)
        failed = written(ai, done, target)
    print(f"{done.request_counts.completed if done.request_counts else 0} summaries in {target}, {failed} failed")
    return 1 if failed or done.status != "completed" else 0


def found(ai: OpenAI, name: str) -> Batch | None:
    """The batch of an earlier run on the same texts."""
    for batch in ai.batches.list(limit=100):
        if (batch.metadata or {}).get("texts") == name and batch.status not in ("failed", "expired", "cancelled"):
            print(f"going on with {batch.id}", file=sys.stderr)
            return batch
    return None


def submitted(ai: OpenAI, texts: str, name: str) -> Batch:
    model = ai.models.list().data[0].id
    lines: list[str] = []
    for text in map(json.loads, texts.splitlines()):
        body = {
            "model": model,
            "max_tokens": MAX_TOKENS,
            "messages": [{"role": "user", "content": ASKED + text["prompt"]}],
        }
        line = {"custom_id": str(text["id"]), "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line))
    file = ai.files.create(file=("texts.jsonl", "\n".join(lines).encode()), purpose="batch")
    return ai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"texts": name}
    )


def awaited(ai: OpenAI, batch: Batch) -> Batch:
    began_s = time.perf_counter()
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(LOOK_S)
        try:
            batch = ai.batches.retrieve(batch.id)
        except (APIConnectionError, InternalServerError) as error:
            print(f"the cluster is unavailable ({error}); the batch is not lost", file=sys.stderr)
            continue
        counts = batch.request_counts
        if counts is not None and counts.total:
            done, waited_s = counts.completed + counts.failed, time.perf_counter() - began_s
            bar = "#" * (40 * done // counts.total)
            print(f"\r[{bar:40}] {done} of {counts.total}, {waited_s:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for problem in (batch.errors.data if batch.errors else None) or ():
        print(f"line {problem.line}: {problem.message}", file=sys.stderr)
    return batch


def written(ai: OpenAI, batch: Batch, target: Path) -> int:
    """Write the summaries and return the number of texts without one."""
    with target.open("w") as out:
        for line in ai.files.content(batch.output_file_id).iter_lines() if batch.output_file_id else ():
            said = json.loads(line)
            text = said["response"]["body"]["choices"][0]["message"]["content"]
            print(json.dumps({"id": said["custom_id"], "text": text}), file=out)
    errors = ai.files.content(batch.error_file_id).text.splitlines() if batch.error_file_id else []
    for line in errors[:10]:
        print(line, file=sys.stderr)
    return len(errors)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} TEXTS.jsonl SUMMARIES.jsonl")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
