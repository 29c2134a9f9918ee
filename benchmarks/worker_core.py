"""What deciding costs: microseconds that the worker's core takes for one decode step, engine and transport left out.

    python -m benchmarks.worker_core

One step = forming the batch (BatchWanted) and handling its outcome (StepDone with a text for every token). Prompts of
512 tokens, blocks of 16; medians over steps, collected while all sequences decode.
"""

import statistics
import time

from ballast.common.ids import RequestId
from ballast.common.sampling import SamplingParams
from services.worker.core.batch import StepResult
from services.worker.core.events import BatchWanted, Execute, SequenceKey, StepDone, StreamOpened, Submitted
from services.worker.core.limits import WorkerLimits
from services.worker.core.worker import WorkerCore

BLOCK_TOKENS = 16
PROMPT_TOKENS = 512
STEP_COUNT = 400


def core_with(sequence_count: int, stop: tuple[str, ...]) -> WorkerCore:
    limits = WorkerLimits(
        block_tokens=BLOCK_TOKENS,
        max_model_len=4096,
        vocab_size=32_000,
        max_running_count=sequence_count,
        max_batch_tokens=8192,
        max_waiting_count=sequence_count,
        max_waiting_tokens=sequence_count * PROMPT_TOKENS,
    )
    core = WorkerCore(limits, sequence_count * 80)
    core.handle(StreamOpened(0.0, 1))
    sampling = SamplingParams(temperature=0.0, max_tokens=STEP_COUNT + 200, stop=stop)
    for handle in range(1, sequence_count + 1):
        core.handle(
            Submitted(
                at_s=0.0,
                key=SequenceKey(1, handle),
                request_id=RequestId(f"r{handle}"),
                attempt=0,
                prompt_token_ids=tuple(range(PROMPT_TOKENS)),
                sampling=sampling,
            )
        )
    return core


def step(core: WorkerCore) -> tuple[float, float, bool]:
    """Seconds for forming and for handling the outcome; whether it was a pure decode step."""
    begin_s = time.perf_counter()
    (execute,) = core.handle(BatchWanted(0.0))
    form_s = time.perf_counter() - begin_s
    assert isinstance(execute, Execute)
    slices = execute.batch.slices
    count = sum(s.samples for s in slices)
    done = StepDone(0.0, StepResult(execute.batch.step_id, (17,) * count, (None,) * count, 0.0), (" some",) * count)
    begin_s = time.perf_counter()
    core.handle(done)
    return form_s, time.perf_counter() - begin_s, all(len(s.token_ids) == 1 for s in slices)


def measure(sequence_count: int, stop: tuple[str, ...]) -> None:
    core = core_with(sequence_count, stop)
    samples = [(form_s, done_s) for form_s, done_s, decode in (step(core) for _ in range(STEP_COUNT)) if decode]
    form_us = statistics.median(form_s for form_s, _ in samples) * 1e6
    done_us = statistics.median(done_s for _, done_s in samples) * 1e6
    whole = sorted(form_s + done_s for form_s, done_s in samples)
    p99_us = whole[int(len(whole) * 0.99)] * 1e6
    print(
        f"{sequence_count:4d} sequences{' with stop strings' if stop else '':18s}"
        f" form {form_us:6.0f} us  done {done_us:6.0f} us  step {form_us + done_us:6.0f} us  p99 {p99_us:6.0f} us"
    )


def main() -> None:
    for sequence_count in (32, 64, 256):
        measure(sequence_count, ())
        measure(sequence_count, ("\n\n", "</answer>", "User:"))


if __name__ == "__main__":
    main()
