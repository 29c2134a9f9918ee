"""A batch on its way through the stages of a pipeline."""

from typing import NamedTuple

from ballast.common.ids import Epoch
from services.worker.core.batch import Batch, Slice
from sim.cost import Work

BATCH_BYTES = 64  # of a message, for each sequence


class InFlight(NamedTuple):
    epoch: Epoch
    batch: Batch
    work: Work
    growing: Batch  # only the slices that need more blocks than the tokens before them: what stages behind have to do
    size_bytes: int  # of its message


def flight_of(epoch: Epoch, batch: Batch, work: Work, *, block_tokens: int, token_bytes: int) -> InFlight:
    """`token_bytes`: of activations, for each token."""
    size_bytes = BATCH_BYTES
    growing: list[Slice] = []
    for part in batch.slices:
        first, count = part.first_position, len(part.token_ids)
        size_bytes += count * token_bytes + BATCH_BYTES
        if -(-first // block_tokens) * block_tokens < first + count:
            growing.append(part)
    return InFlight(epoch, batch, work, Batch(batch.step_id, batch.removed, (), tuple(growing)), size_bytes)
