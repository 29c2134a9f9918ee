"""Measures the planner's decision about an overload of many instances: survey, comparison and plan.

    python -m benchmarks.decide [--instances 1000] [--repeats 5]

Prints milliseconds of processor time, the least and the middle of the repeats, for memories that are alike, that differ
by 1 %, and that are of twenty kinds.
"""

import argparse
import gc
import random
import statistics
import time
from dataclasses import replace

from ballast.common.cost import CostModel
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.model import ModelInfo
from ballast.common.traffic import Pace, Traffic
from services.planner.core.change_requests import Approved, DropRequest, Planning, Rejected, decide
from services.planner.core.messages import ClusterLoad

_LAYERS, _BLOCK_TOKENS, _EXTENT_BYTES = 48, 16, 16 << 20
_MODEL = ModelInfo(
    name="14B",
    architecture="Qwen2ForCausalLM",
    layer_count=_LAYERS,
    vocab_size=152_064,
    max_model_len=32_768,
    dtype="bfloat16",
    parameter_count=14_000_000_000,
    kv_bytes_per_token=4096 * _LAYERS,
    eos_token_ids=(),
    layer_parameter_bytes=(550_000_000,) * _LAYERS,
    other_parameter_bytes=3_100_000_000,
    block_bytes=4096 * _BLOCK_TOKENS,
)
_PACE = Pace(CostModel(attention_s=2e-9, token_s=4e-5, chunk_s=0.0252, shared_s=0.025), _LAYERS, 2048)
_BUDGET_BYTES = int(36e9)
_SPREADS = ("alike", "1 % apart", "twenty kinds")


def budget_bytes(spread: str, number: int, rng: random.Random) -> int:
    if spread == "1 % apart":
        return int(_BUDGET_BYTES * (1 + 0.01 * rng.random()))
    return int(_BUDGET_BYTES * 1.025 ** (number % 20)) if spread == "twenty kinds" else _BUDGET_BYTES


def overloaded(count: int, spread: str) -> tuple[Layout, ClusterLoad]:
    """Instances that serve alone and are full, while as many requests wait as run."""
    rng = random.Random(3)
    loads: dict[WorkerId, LoadReport] = {}
    groups: list[Group] = []
    for number in range(count):
        name, budget = WorkerId(f"worker-{number:04}"), budget_bytes(spread, number, rng)
        extents = budget // _EXTENT_BYTES
        parameters = _LAYERS * -(-550_000_000 // _EXTENT_BYTES) + -(-3_100_000_000 // _EXTENT_BYTES)
        blocks = (extents - parameters) // _LAYERS * _EXTENT_BYTES // _MODEL.block_bytes
        used = int(blocks * rng.uniform(0.85, 1.0))
        memory = MemoryReport(
            budget_bytes=budget,
            parameter_bytes=parameters * _EXTENT_BYTES,
            kv_bytes=budget - parameters * _EXTENT_BYTES,
            free_bytes=0,
            extent_bytes=_EXTENT_BYTES,
        )
        loads[name] = LoadReport(
            block_tokens=_BLOCK_TOKENS,
            block_count=blocks,
            used_block_count=used,
            waiting_block_count=rng.randint(0, 200),
            running_count=30,
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
        queued_tokens=6_000 * count,
        recent_count=9 * count,
        minute_count=20 * count,
        minute_tokens=20_000 * count,
        calm_per_s=0.2 * count,
        ended_count=20 * count,
        ended_tokens=8_000 * count,
        open_tokens=6_000 * count,
        known_s=300.0,
    )
    return Layout(Epoch(1), _LAYERS, tuple(groups), "measured"), ClusterLoad(loads, traffic, _PACE)


def measure(count: int, spread: str, repeats: int) -> tuple[list[float], Approved | Rejected]:
    """Seconds of processor time of each, and what was decided."""
    layout, load = overloaded(count, spread)
    wish, times, found = DropRequest("overload", "benchmark", required_bytes=1 << 30), list[float](), Rejected("")
    for _ in range(repeats):
        gc.collect()
        began_s = time.process_time()
        found = decide(wish, layout, replace(_MODEL), load, Epoch(2), Planning())
        times.append(time.process_time() - began_s)
    return times, found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for spread in _SPREADS:
        times, found = measure(arguments.instances, spread, arguments.repeats)
        why = found.why if isinstance(found, Rejected) else found.target.reason
        least, middle = 1e3 * min(times), 1e3 * statistics.median(times)
        print(f"{arguments.instances} instances, {spread}: {least:.0f} / {middle:.0f} ms; {why.split('; ')[-1]}")


if __name__ == "__main__":
    main()
