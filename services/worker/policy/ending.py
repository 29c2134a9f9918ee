"""Decides when a draining worker without requests may exit.

Other members depend on the layers of a pipeline's stage: its exit would break the pipeline, so all running sequences
would be recomputed, and the other members would have to load the missing layers.
"""

# How long to wait for an idle pipeline to be dissolved, which never happens if the planner is away or the whole cluster
# is being stopped.
_GIVEN_UP_S = 30.0


def may_end(pipeline_request_count: int | None, idle_s: float) -> bool:
    """True if a draining worker without requests may exit. `pipeline_request_count`: requests of the pipeline to which
    it belongs; None: it belongs to none. `idle_s`: time since the pipeline had any.
    """
    if pipeline_request_count is None:
        return True
    return not pipeline_request_count and idle_s >= _GIVEN_UP_S
