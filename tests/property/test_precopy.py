"""KV copied ahead of a restore: whatever happens to sequences, blocks and answers meanwhile, what counts as copied is
right at the commit.
"""

import pytest

from tests.support.precopy_sim import story

SEEDS, CHUNK = 600, 100


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_what_was_copied_is_right_at_the_commit(first: int) -> None:
    copied = refused = gone = 0
    for seed in range(first, first + CHUNK):
        pipeline, blocks = story(seed)
        copied += blocks
        refused += sum(stage.refused for stage in pipeline.stages.values())
        gone += pipeline.gone_while_read
    assert min(copied, refused, gone) > 0, "the stories have seen what they are about"
