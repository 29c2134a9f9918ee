"""What goes with a batch through the stages of a pipeline, in the place of activations."""

from typing import NamedTuple

from services.worker.core.batch import Batch
from sim.cost import Work

BATCH_BYTES = 64  # of a message, for each sequence


class Flight(NamedTuple):
    work: Work
    size_bytes: int  # of its message


def flight_of(batch: Batch, work: Work, *, token_bytes: int) -> Flight:
    """`token_bytes`: of activations, for each token."""
    token_count = sum([len(part.token_ids) for part in batch.slices])
    return Flight(work, BATCH_BYTES * (1 + len(batch.slices)) + token_count * token_bytes)
