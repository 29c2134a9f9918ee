"""Overload policies: what happens when KV memory runs short (`--overload-policy` of planner and workers)."""

from enum import StrEnum


class OverloadPolicy(StrEnum):
    """For `drop`, `static-pipeline` (merging instances) and `migrate` the planner acts, otherwise each worker by
    itself.
    """

    DROP = "drop"  # replicated layers make room for KV and are restored afterwards (KunServe)
    RECOMPUTE = "recompute"  # preempted requests drop their KV and are recomputed (vLLM)
    SWAP = "swap"  # preempted requests wait with their KV in host memory (InferCept)
    MIGRATE = "migrate"  # running requests migrate to instances with more room; others are recomputed (Llumnix)
    STATIC_PIPELINE = "static-pipeline"  # layers are dropped from the start, for good (vLLM with pipelines)
