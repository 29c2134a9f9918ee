"""Messages between members survive encoding and decoding."""

from dataclasses import replace

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NamedBlocks, NewSequence, Slice, SwapCopy, TakenBlocks
from services.worker.pipeline.wire import batch_from_bytes, batch_to_bytes


def test_a_batch_survives_a_round_trip() -> None:
    new = NewSequence(7, (1, 2, 3), (4,), SamplingParams(temperature=0.0, seed=5, max_tokens=9))
    batch = Batch(12, (3, 4), (new,), (Slice(5, 40, (9,), True), Slice(7, 0, (1, 2), False)), 0.25, True)
    copies = (SwapCopy(9, True, 2, 70, (4, 5)), SwapCopy(3, False, 0, 10, (0,)))
    named = (NamedBlocks(3, 2, 5 << 32, 4),)
    taken = (TakenBlocks(7, ((5 << 32, 2), (90, 1))), TakenBlocks(8, ()))
    numbered = replace(batch, named=named, forgotten=((4, 1000), (9, 1)), taken=taken)
    for sent in (batch, replace(batch, memory_is_awaited=False), replace(batch, quiet_s=0.0, copies=copies), numbered):
        assert batch_from_bytes(batch_to_bytes(sent)) == sent
