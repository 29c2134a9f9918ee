"""Computes the longest context that instances of a cluster can hold together (pure)."""

from collections.abc import Sequence

from ballast.common.ids import WorkerId
from ballast.common.load import MemoryReport
from ballast.common.reach import Reach
from services.planner.policy.candidates import MOST_STAGES
from services.planner.policy.snapshot import InstanceState, ModelShape
from services.planner.policy.split import Splitter, SplitTolerance, kinds_of


def reach_of(model: ModelShape, memories: Sequence[MemoryReport], max_model_len: int) -> Reach:
    """Return the longest sequence that fits into the largest single instance, and into a group of those with most
    memory. There must be at least one instance.
    """
    whole, layer_count = tuple(range(model.layer_count)), model.layer_count
    blocks = [model.at(one.extent_bytes).block_count(one.budget_bytes, 0, layer_count) for one in memories]
    largest = sorted(zip(blocks, memories, strict=True), key=lambda pair: -pair[0])[:MOST_STAGES]
    members = [
        InstanceState(WorkerId(str(number)), one.budget_bytes, 0, layer_count, whole, one.extent_bytes)
        for number, (_, one) in enumerate(largest)
    ]
    alone_tokens = min(max_model_len, max(0, *blocks, 0) * model.block_tokens)
    best, size = alone_tokens, 1
    splitter = Splitter(model, SplitTolerance(capacity=0.0))
    for count in range(2, min(len(members), layer_count) + 1):
        if best >= max_model_len:
            break
        bounds = splitter.bounds(kinds_of(members[:count]), 1.0)
        tokens = 0 if bounds is None else min(max_model_len, bounds.block_count * model.block_tokens)
        if tokens > best:
            best, size = tokens, count
    return Reach(alone_tokens, best, size, len(memories))
