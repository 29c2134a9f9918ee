"""Overload policies, chosen by `--overload-policy` of planner and workers."""

from enum import StrEnum


class OverloadPolicy(StrEnum):
    """Policy for a shortage of KV memory. The planner executes `drop`, `static-pipeline` and `migrate`; each worker
    executes the others independently.
    """

    DROP = "drop"  # replicated layers are dropped to make room for KV, and restored afterwards (KunServe)
    RECOMPUTE = "recompute"  # preempted requests drop their KV and are recomputed (vLLM)
    SWAP = "swap"  # preempted requests wait with their KV in host memory (InferCept)
    MIGRATE = "migrate"  # running requests migrate to instances with more room; others are recomputed (Llumnix)
    STATIC_PIPELINE = "static-pipeline"  # layers are dropped from the start, permanently (vLLM with pipelines)
