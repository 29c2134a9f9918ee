"""The line of a cluster's KV capacity over time."""

from tools.bench.results import PolicyResult

_REPORT_S = 0.2  # until everybody has told what there is after a transition


def settled_capacity(policy: PolicyResult) -> tuple[list[float], list[int]]:
    """Instants and bytes, without samples from within a transition.

    While layers go or come, a leader counts on no more than what the smallest of its stages is sure to have, so what
    it tells then is for its own admission: often less than there was before and is afterwards.
    """
    spans = [
        (t.at_s, t.at_s + t.duration_s + _REPORT_S)
        for t in policy.transitions
        if t.kind is not None and t.duration_s is not None
    ]
    series = policy.series
    settled = [
        (at_s, capacity_bytes)
        for at_s, capacity_bytes in zip(series.at_s, series.kv_capacity_bytes, strict=True)
        if not any(begin_s <= at_s <= end_s for begin_s, end_s in spans)
    ]
    return [at_s for at_s, _ in settled], [capacity_bytes for _, capacity_bytes in settled]
