"""When a worker that drains, and of which no request wants anything any more, may end.

Others compute with what a stage of a pipeline holds. Its end would break the pipeline up: all that runs there would be
computed anew, and the other members would be without their missing layers until those are read again.
"""

_GIVEN_UP_S = 30.0  # nobody dissolves a pipeline while the planner is away, or when a whole cluster is stopped


def may_end(pipeline_request_count: int | None, idle_s: float) -> bool:
    """`pipeline_request_count`: of the pipeline that holds this worker; None: none does. `idle_s`: since it had any."""
    if pipeline_request_count is None:
        return True
    return not pipeline_request_count and idle_s >= _GIVEN_UP_S
