"""Ballast's engine as `engine_against_vllm` runs it: as `vllm_engine`, in a process of its own."""

import json
import os
import sys
from pathlib import Path

from benchmarks.engine_throughput import MEMORY_BYTES, Request, limits_of, run_ballast
from services.worker.engine.load import load_engine


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    job = json.loads(sys.stdin.readline())
    requests = [Request(tuple(prompt), count) for prompt, count in job["requests"]]
    with load_engine(
        Path(job["model"]),
        dtype=job["dtype"],
        device_memory_bytes=MEMORY_BYTES,
        max_model_len=job["model_len"],
        threads=job["threads"],
        kernels=job["kernels"],
    ) as engine:
        print(json.dumps({"ready": "native" if engine.kernels else "torch"}), file=answers)
        for _ in sys.stdin:
            heard: dict[int, list[int]] = {}
            spent = run_ballast(engine, requests, limits_of(engine, job["running"], job["batch_tokens"]), heard)
            tokens = [heard[i] for i in range(len(requests))]
            answer = {"wall_s": spent.wall_s, "processor_s": spent.processor_s, "tokens": tokens}
            print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
