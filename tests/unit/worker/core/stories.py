"""Helpers for stories of the worker core: drivers, prompts, endings, and slices of a batch."""

from services.worker.core import events as w
from services.worker.policy.harvest import Harvest
from services.worker.policy.token_target import TokenTarget
from tests.support.worker_core import VOCAB_SIZE, Driver, limits


def driver(
    block_count: int = 32,
    target: TokenTarget | None = None,
    harvest: Harvest | None = None,
    **bounds: int | float,
) -> Driver:
    made = Driver(limits(**bounds), block_count, target, harvest)  # pyright: ignore[reportArgumentType]
    made.open(1)
    return made


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + i) % (VOCAB_SIZE - 1) for i in range(length))


def ending(made: Driver, key: w.SequenceKey) -> w.Ending:
    found = made.received[key].ending
    assert found is not None
    return found


def slices(execute: w.Execute | None) -> list[tuple[int, int, int, bool]]:
    """The slices of a batch as (sequence id, first position, token count, whether the slice samples)."""
    assert execute is not None
    return [(s.sequence_id, s.first_position, len(s.token_ids), s.samples) for s in execute.batch.slices]
