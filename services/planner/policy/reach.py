"""How long a context the instances of a cluster could hold together (pure)."""

from ballast.common.reach import Reach
from services.planner.policy.candidates import MOST_STAGES
from services.planner.policy.snapshot import Snapshot
from services.planner.policy.split import Splitter, SplitTolerance, kinds_of


def reach_of(snapshot: Snapshot, max_model_len: int) -> Reach:
    """The longest sequence in the largest instance alone, and in a group of those with most memory."""
    model = snapshot.model
    whole = tuple(range(model.layer_count))
    members = [
        (model.at(m.extent_bytes).block_count(m.budget_bytes, 0, model.layer_count), m)
        for group in snapshot.groups
        for m in group.members
    ]
    members.sort(key=lambda member: (-member[0], member[1].worker_id))
    alone_tokens = min(max_model_len, max(0, members[0][0]) * model.block_tokens)
    best, size = alone_tokens, 1
    splitter = Splitter(model, SplitTolerance(capacity=0.0))
    for count in range(2, min(MOST_STAGES, len(members), model.layer_count) + 1):
        if best >= max_model_len:
            break
        there = [m._replace(first_layer=0, last_layer=model.layer_count, held_layers=whole) for _, m in members[:count]]
        bounds = splitter.bounds(kinds_of(there), 1.0)
        tokens = 0 if bounds is None else min(max_model_len, bounds.block_count * model.block_tokens)
        if tokens > best:
            best, size = tokens, count
    return Reach(alone_tokens, best, size, len(members))
