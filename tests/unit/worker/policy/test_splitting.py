import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.common.cost import Chunk, CostModel
from services.worker.policy.splitting import SequenceWork, added_s, cut, tokens_within


def cost_model(attention_s: float, token_s: float, chunk_s: float, saved: float, prefix_s: float) -> CostModel:
    return CostModel(attention_s, token_s, chunk_s, chunk_s * saved, prefix_s)


COSTS = st.builds(
    cost_model,
    st.floats(0, 1e-6),
    st.floats(1e-7, 1e-3),
    st.floats(0, 0.01),
    st.floats(0, 1),
    st.floats(0, 1e-6),
)


@given(COSTS, st.integers(0, 4000), st.integers(1, 4000))
def test_the_length_of_a_chunk_follows_from_its_cost(cost: CostModel, prefix: int, count: int) -> None:
    alone = cost.chunk_cost_s(Chunk(prefix, count))
    assert added_s(cost, prefix, count) == pytest.approx(alone - cost.shared_s, abs=1e-12)
    assert tokens_within(cost, prefix, added_s(cost, prefix, count)) == pytest.approx(count, rel=1e-3)


@given(COSTS, st.integers(0, 2000), st.integers(1, 60), st.floats(0, 0.05), st.integers(1, 20))
def test_a_cut_is_as_close_to_its_time_limit_as_possible(
    cost: CostModel, prefix: int, count: int, room_s: float, least: int
) -> None:
    chosen = cut(cost, SequenceWork(prefix, count), room_s, least)
    allowed = [0, count, *(n for n in range(least, count - least + 1))]
    assert chosen in allowed
    if added_s(cost, prefix, count) > room_s:  # else all of it is wanted
        off = [abs((added_s(cost, prefix, n) if n else 0.0) - room_s) for n in allowed]
        assert off[allowed.index(chosen)] <= min(off) + 1e-9
