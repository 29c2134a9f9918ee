"""Both sides of a transition in virtual time: calls lost, doubled, late, out of order; anybody may die at any point."""

import os
import subprocess
import sys

import pytest

from tests.support.transition_sim import story

SEEDS = 500
LONG_SEEDS = int(os.environ.get("BALLAST_TRANSITION_SEEDS", "50000"))
CHUNK = 50
LONG_CHUNK = 1000


def run(first: int, last: int) -> None:
    copied_blocks = rests = later_waves = 0
    for seed in range(first, last):
        try:
            world = story(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}: run `python -m tests.support.transition_sim {seed} {seed + 1}`")
            raise
        copied_blocks += world.copies.copied_blocks
        rests += world.copies.rests
        later_waves += world.later_waves
    assert min(copied_blocks, rests) > 0, "restores have copied KV ahead"
    assert later_waves > 0, "victims of drops have waited for others"


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_transition_ends_and_no_sequence_is_lost(first: int) -> None:
    run(first, first + CHUNK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + LONG_SEEDS, LONG_CHUNK))
def test_many_more_of_them(first: int) -> None:
    run(first, min(first + LONG_CHUNK, SEEDS + LONG_SEEDS))


def test_a_story_depends_on_its_seed_only() -> None:
    def traces(hash_seed: str) -> str:
        command = [sys.executable, "-m", "tests.support.transition_sim", "0", "40"]
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=110).stdout

    first = traces("1")
    assert len(set(first.split()[1::2])) == 40, "stories differ"
    assert traces("2") == first
