"""Stand-in for activations, passed with a batch through the stages of a pipeline."""

from typing import NamedTuple

from services.worker.core.batch import Batch
from sim.cost import BatchCost

BATCH_BYTES = 64  # message size per sequence


class Flight(NamedTuple):
    work: BatchCost
    size_bytes: int  # size of the message between stages


def flight_of(batch: Batch, work: BatchCost, *, token_bytes: int) -> Flight:
    """The flight of a batch. `token_bytes`: size of a token's activations."""
    token_count = sum([len(part.token_ids) for part in batch.slices])
    return Flight(work, BATCH_BYTES * (1 + len(batch.slices)) + token_count * token_bytes)
