"""Swapping of an emulated device's KV: blocks keep their contents, and copies take as long as on the device."""

import time

from services.worker.core.batch import Batch, NewSequence, Slice
from services.worker.core.events import BlockCopy
from services.worker.emulation.copier import EmulatedCopier
from tests.support.worker_core import greedy
from tests.unit.worker.emulation.machines import small_engine

_LAYERS = range(4)


def test_a_sequence_continues_from_its_returned_blocks() -> None:
    engine = small_engine()
    copier = EmulatedCopier(engine.memory, 8, 1e12)
    tokens = tuple(range(1, 10))
    engine.step(Batch(1, (), (NewSequence(1, tokens, (), greedy()),), (Slice(1, 0, tokens[:8], False),)), ((0, 1),))
    copier.start((BlockCopy(True, (0, 1), (5, 6)),), _LAYERS)
    copier.finish()
    engine.step(Batch(2, (1,), (NewSequence(2, (9,) * 8, (), greedy()),), (Slice(2, 0, (9,) * 8, False),)), ((0, 1),))
    copier.start((BlockCopy(False, (3, 2), (5, 6)),), _LAYERS)
    copier.finish()
    back = Batch(3, (2,), (NewSequence(1, tokens, (), greedy()),), (Slice(1, 8, tokens[8:], True),))
    engine.step(back, ((3, 2, 4),))
    assert engine.runner.wrong_total == 0
    copier.start((BlockCopy(False, (3, 2), (6, 5)),), _LAYERS)
    copier.finish()
    engine.step(Batch(4, (1,), back.added, back.slices), ((3, 2, 4),))
    assert engine.runner.wrong_total == 1, "blocks in the wrong order must be noticed"
    engine.close()


def test_copies_take_as_long_as_the_bytes_of_one_direction() -> None:
    engine = small_engine()
    block_bytes = engine.memory.kv.shape.block_bytes
    copier = EmulatedCopier(engine.memory, 8, block_bytes * len(_LAYERS) / 0.02)
    engine.step(Batch(1, (), (NewSequence(1, (1,) * 8, (), greedy()),), (Slice(1, 0, (1,) * 8, False),)), ((0, 1),))
    began_s = time.monotonic()
    copier.start((BlockCopy(True, (0, 1), (0, 1)),), _LAYERS)
    copier.start((BlockCopy(True, (0, 1), (0, 1)), BlockCopy(False, (2,), (1,))), _LAYERS)
    assert copier.finish() == 0.04
    assert 0.03 < time.monotonic() - began_s < 0.5
    engine.close()
