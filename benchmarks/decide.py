"""Measures how long a planner takes to decide how to handle an overload of many instances: survey, comparison and plan.

    python -m benchmarks.decide [--instances 1000] [--rounds 5]

All memories are nearly full; their sizes are equal, differ by up to 1 %, or are of twenty kinds. The program prints the
processor time in ms: minimum and median over the rounds.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ballast.common.cost import CostModel
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.model import ModelInfo
from ballast.common.traffic import Pace, Traffic
from services.planner.core.change_requests import Approved, DropRequest, Planning, decide
from services.planner.core.messages import ClusterLoad

_LAYERS, _BLOCK_TOKENS, _EXTENT_BYTES = 40, 16, 16 << 20
_MODEL = ModelInfo(
    name="14B",
    architecture="llama",
    layer_count=_LAYERS,
    vocab_size=32_000,
    max_model_len=4096,
    dtype="bfloat16",
    parameter_count=14_000_000_000,
    kv_bytes_per_token=4096 * _LAYERS,
    eos_token_ids=(2,),
    layer_parameter_bytes=(660_000_000,) * _LAYERS,
    other_parameter_bytes=3_100_000_000,
    block_bytes=4096 * _BLOCK_TOKENS,
)
_PACE = Pace(CostModel(attention_s=2e-9, token_s=4e-5, chunk_s=0.0252, shared_s=0.025), _LAYERS, 2048)


def overloaded(count: int, budget_of: Callable[[int], float]) -> tuple[Layout, ClusterLoad]:
    """Layout and load of `count` overloaded instances that serve alone. `budget_of`: instance number -> its memory."""
    rng = random.Random(3)
    parts = (*_MODEL.layer_parameter_bytes, _MODEL.other_parameter_bytes)
    parameters = sum(-(-size // _EXTENT_BYTES) for size in parts) * _EXTENT_BYTES
    loads, groups = dict[WorkerId, LoadReport](), list[Group]()
    for number in range(count):
        name, budget = WorkerId(f"worker-{number:05}"), int(budget_of(number))
        blocks = (budget - parameters) // _LAYERS // _MODEL.block_bytes
        memory = MemoryReport(
            budget_bytes=budget,
            parameter_bytes=parameters,
            kv_bytes=budget - parameters,
            free_bytes=0,
            extent_bytes=_EXTENT_BYTES,
        )
        loads[name] = LoadReport(
            block_tokens=_BLOCK_TOKENS,
            block_count=blocks,
            used_block_count=int(blocks * rng.uniform(0.85, 1.0)),
            waiting_block_count=rng.randint(0, 200),
            running_count=40,
            waiting_count=4,
            max_running_count=256,
            steps_total=1000,
            preemptions_total=0,
            prompt_tokens_total=0,
            generation_tokens_total=0,
            step_age_s=0.01,
            draining=False,
            memory=memory,
        )
        member = Member(name, Incarnation(1), f"{name}:1", 0, _LAYERS)
        groups.append(Group(GroupId(name), (member,)))
    traffic = Traffic(
        queued_count=6 * count,
        queued_tokens=6000 * count,
        recent_count=9 * count,
        minute_count=20 * count,
        minute_tokens=20_000 * count,
        calm_per_s=0.2 * count,
        ended_count=20 * count,
        ended_tokens=8000 * count,
        open_tokens=6000 * count,
        known_s=300.0,
    )
    return Layout(Epoch(1), _LAYERS, tuple(groups), "measured"), ClusterLoad(loads, traffic, _PACE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    rng = random.Random(3)
    spreads: dict[str, Callable[[int], float]] = {
        "alike": lambda _: 36e9,
        "1 % apart": lambda _: 36e9 * (1 + 0.01 * rng.random()),
        "twenty kinds": lambda number: 36e9 * 1.025 ** (number % 20),
    }
    overload = DropRequest("overload", "benchmark", required_bytes=1 << 30, again=True)
    for spread, budget_of in spreads.items():
        (layout, load), times, found = overloaded(args.instances, budget_of), list[float](), None
        for _ in range(args.rounds):
            gc.collect()
            began_s = time.process_time()
            found = decide(overload, layout, replace(_MODEL), load, Epoch(2), Planning())
            times.append(1e3 * (time.process_time() - began_s))
        what = found.target.reason if isinstance(found, Approved) else "nothing"
        print(f"{args.instances} instances, {spread}: {min(times):.0f} / {statistics.median(times):.0f} ms; {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
