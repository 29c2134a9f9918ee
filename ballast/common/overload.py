"""Overload policies, chosen by `--overload-policy` of planner and workers."""

from enum import StrEnum


class OverloadPolicy(StrEnum):
    """What happens when KV memory runs short. `drop`, `static-pipeline` and `migrate` are carried out by the planner,
    the others by each worker by itself.
    """

    DROP = "drop"  # replicated layers make room for KV and are restored afterwards (KunServe)
    RECOMPUTE = "recompute"  # preempted requests drop their KV and are recomputed (vLLM)
    SWAP = "swap"  # preempted requests wait with their KV in host memory (InferCept)
    MIGRATE = "migrate"  # running requests migrate to instances with more room; others are recomputed (Llumnix)
    STATIC_PIPELINE = "static-pipeline"  # layers are dropped from the start, for good (vLLM with pipelines)
