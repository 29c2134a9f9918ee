"""For any arrivals, every request ends exactly once, with all its tokens in order, and the accounting stays consistent.
The run is identical whether steps without decisions are simulated together or one by one.

The simulated clients check every token, and the cores check themselves after every event.
"""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import example, given, settings

from sim.clients import Arrival
from sim.results import Outcome
from sim.world import World
from tests.support.simulated import options

_SPAN_S = 12.0

arrivals = st.lists(
    st.builds(
        Arrival,
        at_s=st.floats(0.0, _SPAN_S, allow_nan=False),
        input_tokens=st.integers(1, 3000),
        output_tokens=st.integers(1, 200),
        caller=st.just(""),
        hash_ids=st.just(()),
        hash_tokens=st.just(512),
    ),
    min_size=1,
    max_size=60,
)
policies = st.sampled_from(("drop", "recompute", "swap", "static-pipeline"))
in_heaps = st.lists(st.tuples(st.floats(0.0, _SPAN_S), st.integers(5, 30), st.integers(200, 2500)), max_size=3)


@settings(max_examples=6)
@given(arrivals, in_heaps, policies, st.integers(2, 4), st.integers(0, 9))
@example([Arrival(0.0, 3500, 500)], [(0.0, 30, 1500), (4.0, 30, 1500)], "drop", 3, 0)
def test_every_request_ends_once(
    scattered: list[Arrival], heaps: list[tuple[float, int, int]], policy: str, gpu_count: int, seed: int
) -> None:
    heaped = [Arrival(at_s, tokens, 100) for at_s, count, tokens in heaps for _ in range(count)]
    made = options(policy, cluster=f"{gpu_count}xA100-40G", check_every=5, seed=seed)
    made, trace = replace(made, dispatcher_count=1 + seed % 2), sorted([*scattered, *heaped])
    run = World(made, trace).run()
    for record in run.records:
        assert record.outcome is Outcome.FINISHED, record.error
        assert len(record.token_times_s) == record.wanted_tokens
    step_by_step = World(replace(made, fast_forwards=False, check_every=0), trace).run()
    assert step_by_step.trace_hash == run.trace_hash
    assert step_by_step.records == run.records
    assert step_by_step.samples == run.samples
