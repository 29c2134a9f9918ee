"""One engine with one thread and with two, in turn: on the machine as it is, and beside a process that never waits.

    python -m benchmarks.engine_threads [--rounds N]

The job of `engine_against_vllm`, in wall time. On an idle machine of two cores two threads are to be faster than one,
and beside the busy process, which takes half of the machine, never slower. The exit status says whether that is so.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from ballast.model.tiny import make_preset
from benchmarks.engine_against_vllm import (
    BATCH_TOKENS,
    INPUT_MEAN,
    MODEL_LEN,
    OUTPUT_MEAN,
    EngineProcess,
    Runs,
    engine_process,
    verdict,
)
from benchmarks.engine_throughput import environment, make_requests
from services.worker.engine.model_config import read_model_config

THREADS = (1, 2)


@contextmanager
def busy_process() -> Generator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run_in_turn(engines: list[EngineProcess], rounds: int) -> float:
    """How many times as fast the last is as the first."""
    for engine in engines:
        engine.runs = Runs()
    for _ in range(rounds):
        for engine in engines:
            engine.run()
    for engine in engines:
        print(f"| {engine.name} | {engine.runs.median_s('wall'):.2f} | {engine.runs.median_s('processor'):.2f} |")
    return engines[0].runs.median_s("wall") / engines[-1].runs.median_s("wall")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(environment(), "\n\n| | wall s | processor s |\n|---|---|---|")
    verdicts: list[tuple[str, bool]] = []
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder, ExitStack() as stack:
        model = make_preset("bench", Path(folder) / "model")
        requests = make_requests(read_model_config(model).vocab_size, "exponential", INPUT_MEAN, OUTPUT_MEAN)
        job = {
            "model": str(model),
            "dtype": "float32",
            "running": 64,
            "kernels": "native",
            "batch_tokens": BATCH_TOKENS,
            "model_len": MODEL_LEN,
            "requests": [[request.prompt, request.output_tokens] for request in requests],
        }
        command = [sys.executable, "-m", "benchmarks.ballast_engine"]
        engines = [
            stack.enter_context(engine_process(f"{n} threads", command, {**os.environ}, job | {"threads": n}))
            for n in THREADS
        ]
        for engine in engines:
            engine.wait_until_ready()
        for where, others in (("alone", nullcontext()), ("beside a busy process", busy_process())):
            print(f"| **{where}** | | |")
            with others:
                verdicts.append(verdict(f"two threads {where}, times one", run_in_turn(engines, rounds), 1.0))
    print("", *(line for line, _ in verdicts), sep="\n")
    return 0 if all(good for _, good in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
