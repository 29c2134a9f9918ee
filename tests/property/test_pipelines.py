"""Groups merge and split while requests run: the tokens always equal those of undisturbed requests.

A history is drawn from its seed (see tests.support.pipeline_history): to reproduce a failure, use `tell(seed)`.
"""

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.pipeline_history import History


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 2**31))
def test_no_history_changes_a_token_loses_an_ending_or_keeps_a_block(seed: int) -> None:
    History(seed).play()


def test_histories_cover_the_critical_cases() -> None:
    played = [History(seed).play() for seed in (*range(11), 15)]  # 15: long prompts, with lookahead
    for name in ("merge", "split", "carry", "lose_kv", "claims", "roll_back", "shrink", "lose_stream"):
        assert sum(history.counts[name] for history in played) >= 5, name
    assert sum(history.cluster.resumed_from_kv for history in played) >= 50
    assert sum(history.cluster.overlapped for history in played) >= 50
    assert sum(worker.copied_blocks for history in played for worker in history.cluster.workers) >= 50
    assert sum(history.cluster.swapped_in_pipelines for history in played) >= 20
    assert sum(history.returned_from_mirrors for history in played) >= 20
    cores = [worker.core.totals for history in played for worker in history.cluster.workers]
    assert sum(totals.adopted for totals in cores) >= 100
    assert sum(totals.preemptions for totals in cores) >= 100
