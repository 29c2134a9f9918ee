"""What members say to each other arrives as it was said."""

from dataclasses import replace

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NewSequence, Slice
from services.worker.pipeline.wire import batch_from_bytes, batch_to_bytes


def test_a_batch_arrives_with_all_that_its_leader_knows() -> None:
    new = NewSequence(7, (1, 2, 3), (4,), SamplingParams(temperature=0.0, seed=5, max_tokens=9))
    batch = Batch(12, (3, 4), (new,), (Slice(5, 40, (9,), True), Slice(7, 0, (1, 2), False)), 0.25, True)
    for sent in (batch, replace(batch, memory_is_awaited=False), replace(batch, quiet_s=0.0)):
        assert batch_from_bytes(batch_to_bytes(sent)) == sent
