"""A caller with thousands of requests at once, and another with occasional requests, in a simulated cluster."""

from dataclasses import replace

from sim.clients import Arrival
from sim.world import World
from tests.support.simulated import options

FLOOD_COUNT, FLOOD_AT_S = 3000, 2.0
ANSWER_TOKENS = 150  # answer length of the flood's requests, each of which takes about 5 s
BATCH_S = 0.8  # duration of the full prompt batch that is running on arrival, plus that of the request's own batch


def test_an_occasional_caller_is_served_in_a_flood() -> None:
    """Each request waits only for the running batch. It waits for no queued request, and for no answer to end."""
    few = [Arrival(FLOOD_AT_S + 6.0 + 1.5 * i, 300, 16, "few") for i in range(8)]
    flood = [Arrival(FLOOD_AT_S + 1e-4 * i, 200, ANSWER_TOKENS, "flood") for i in range(FLOOD_COUNT)]
    arrivals = sorted(few + flood)
    made = replace(options(cluster="4xA100-40G", check_every=0), stop_after_s=FLOOD_AT_S + 25.0)
    run = World(made, arrivals).run()
    own = [record for record, arrival in zip(run.records, arrivals, strict=True) if arrival.caller == "few"]
    waits = [record.token_times_s[0] - record.arrival_s for record in own if record.token_times_s]
    assert len(waits) == len(few), "none is refused, and none is still waiting"
    print(f"first tokens after {', '.join(f'{wait:.2f}' for wait in waits)} s")
    assert max(waits) < BATCH_S
    assert sorted(waits)[len(waits) // 2] < 0.15
