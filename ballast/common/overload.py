"""What becomes of requests when KV memory runs short: `--overload-policy`, of planner and workers."""

from enum import StrEnum


class OverloadPolicy(StrEnum):
    """The planner acts (`drop`, `static-pipeline`: it merges instances; `migrate`), or each worker for itself."""

    DROP = "drop"  # replicated layers make room for KV, and come back afterwards (KunServe)
    RECOMPUTE = "recompute"  # who does not fit gives its KV up and is computed anew (vLLM)
    SWAP = "swap"  # who does not fit waits with its KV in host memory (InferCept)
    MIGRATE = (
        "migrate"  # running requests move to instances with more room; who fits nowhere is computed anew (Llumnix)
    )
    STATIC_PIPELINE = "static-pipeline"  # layers are dropped from the start, for good (vLLM with pipelines)
