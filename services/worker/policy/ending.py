"""Decides when a draining worker without requests may exit.

The other members of a pipeline depend on the layers of a stage. If it exited, the pipeline would break: all running
sequences would be recomputed, and the other members would have to load the missing layers.
"""

# How long to wait until an idle pipeline is dissolved, which never happens if the planner is down or the whole cluster
# is being stopped.
_GIVEN_UP_S = 30.0


def may_end(pipeline_request_count: int | None, idle_s: float) -> bool:
    """True if a draining worker without requests may exit. `pipeline_request_count`: requests of its pipeline; None: it
    belongs to no pipeline. `idle_s`: time since the pipeline had requests.
    """
    if pipeline_request_count is None:
        return True
    return not pipeline_request_count and idle_s >= _GIVEN_UP_S
