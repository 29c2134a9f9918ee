"""Small simulated clusters whose memory a few requests fill."""

import random

from sim.clients import Arrival
from sim.hardware import find_cluster, find_model, timings
from sim.jobs.simulation import WorkerSize, production_rules
from sim.policies import find_policy
from sim.world import World, WorldOptions


def options(policy: str = "drop", *, cluster: str = "2xA100-40G", check_every: int = 1, seed: int = 0) -> WorldOptions:
    """Llama-2-13B on GPUs of 40 GB: 12 GB of KV each, which 13 requests of 1,100 tokens fill."""
    return WorldOptions(
        model=find_model("Llama-2-13B"),
        cluster=find_cluster(cluster),
        timings=timings(),
        rules=find_policy(policy)(production_rules(WorkerSize())),
        check_every=check_every,
        seed=seed,
    )


def burst(
    *, seed: int = 1, base_per_s: float = 1.0, burst_per_s: float = 8.0, begin_s: float = 5.0, burst_s: float = 6.0
) -> list[Arrival]:
    """Poisson arrivals over 35 s with one burst; prompts of 200 to 1,500 tokens, answers of 40 to 300."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = 0.0
    while at_s < 35.0:
        arrivals.append(Arrival(at_s, rng.randint(200, 1500), rng.randint(40, 300)))
        at_s += rng.expovariate(burst_per_s if begin_s <= at_s < begin_s + burst_s else base_per_s)
    return arrivals


def world(policy: str = "drop", arrivals: list[Arrival] | None = None, *, check_every: int = 1) -> World:
    return World(options(policy, check_every=check_every), burst() if arrivals is None else arrivals)


def long_answers(seed: int, count: int = 160) -> list[Arrival]:
    """Arrivals with a reasoning model's answer lengths: lognormal, median 1,000 tokens, at most 6,000, at a random
    rate.
    """
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s, per_s = 0.0, rng.uniform(1.5, 5.0)
    for _ in range(count):
        at_s += rng.expovariate(per_s)
        arrivals.append(Arrival(at_s, rng.randint(100, 2500), min(6000, int(rng.lognormvariate(6.9, 0.9)) + 1)))
    return arrivals
