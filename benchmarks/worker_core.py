"""What deciding costs: microseconds that the worker's core takes for one decode step, engine and transport left out.

    python -m benchmarks.worker_core

One step = forming the batch (BatchWanted) and handling its outcome (StepDone with a text for every token). Prompts of
512 tokens, blocks of 16; medians over steps, collected while all sequences decode.

The second table counts what a saturated cache costs: 300 requests at once (prompts of 50 to 400 tokens, as many
generated) in 64 places, by the share of blocks that admission keeps free. Counts only, no clock: it repeats exactly.
"""

import random
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


def submitted(handle: int, prompt_tokens: int, sampling: SamplingParams) -> Submitted:
    return Submitted(
        at_s=0.0,
        key=SequenceKey(1, handle),
        request_id=RequestId(f"r{handle}"),
        attempt=0,
        prompt_token_ids=tuple(range(prompt_tokens)),
        sampling=sampling,
    )


def outcome(execute: Execute) -> StepDone:
    count = sum(s.samples for s in execute.batch.slices)
    return StepDone(0.0, StepResult(execute.batch.step_id, (17,) * count, (None,) * count, 0.0), (" some",) * count)


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
        core.handle(submitted(handle, PROMPT_TOKENS, sampling))
    return core


def step(core: WorkerCore) -> tuple[float, float, bool]:
    """Seconds for forming and for handling the outcome; whether it was a pure decode step."""
    begin_s = time.perf_counter()
    (execute,) = core.handle(BatchWanted(0.0))
    form_s = time.perf_counter() - begin_s
    assert isinstance(execute, Execute)
    slices = execute.batch.slices
    done = outcome(execute)
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


def saturate(block_count: int, reserve_fraction: float) -> None:
    rng = random.Random(1)
    limits = WorkerLimits(
        block_tokens=BLOCK_TOKENS,
        max_model_len=2048,
        vocab_size=32_000,
        max_waiting_count=1000,
        max_waiting_tokens=1_000_000,
        admission_reserve_fraction=reserve_fraction,
    )
    core = WorkerCore(limits, block_count)
    core.handle(StreamOpened(0.0, 1))
    for handle in range(1, 301):
        prompt, answer = rng.randrange(50, 400), rng.randrange(50, 400)
        core.handle(submitted(handle, prompt, SamplingParams(temperature=0.0, max_tokens=answer)))
    computed_tokens = 0
    while core.has_work:
        (execute,) = core.handle(BatchWanted(0.0))
        assert isinstance(execute, Execute)
        computed_tokens += sum(len(s.token_ids) for s in execute.batch.slices)
        core.handle(outcome(execute))
    totals = core.totals
    needed_tokens = totals.prompt_tokens + totals.generation_tokens - 300  # the last token of each needs no KV
    print(
        f"{block_count:5d} blocks  reserve {reserve_fraction:4.2f}  {totals.steps:5d} steps"
        f"  {totals.preemptions:4d} preemptions  {computed_tokens / needed_tokens - 1:6.1%} of tokens computed again"
    )


def main() -> None:
    for sequence_count in (32, 64, 256):
        measure(sequence_count, ())
        measure(sequence_count, ("\n\n", "</answer>", "User:"))
    for block_count in (300, 600, 1200):
        for reserve_fraction in (0.0, 0.01, 0.05, 0.1):
            saturate(block_count, reserve_fraction)


if __name__ == "__main__":
    main()
