"""The emulated runner returns correct tokens only if memory has the correct contents."""

from dataclasses import replace

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NewSequence, Preempted, Slice, StepResult
from services.worker.emulation.engine import EmulatedEngine, emulate
from services.worker.emulation.phantom import phantom
from services.worker.emulation.runner import WEIGHTS, Activation
from services.worker.emulation.tokens import answer
from tests.unit.worker.emulation.machines import BLOCK_TOKENS, VOCABULARY, small_engine, small_machine

PROMPT = tuple(range(7, 17))  # ten tokens: two full blocks of four and half of a third
TABLE = (5, 2, 9, 4, 7)
ANSWER = answer(PROMPT, 8, VOCABULARY)


def new(outputs: tuple[int, ...] = ()) -> NewSequence:
    return NewSequence(1, PROMPT, outputs, SamplingParams(seed=1))


def step(engine: EmulatedEngine, number: int, first: int, tokens: tuple[int, ...], *, added: bool = False) -> int:
    entering = (new(tuple(ANSWER[: first + len(tokens) - len(PROMPT)])),) if added else ()
    result = engine.step(Batch(number, (), entering, (Slice(1, first, tokens, True),)), [TABLE])
    return result.token_ids[0]


def decode(engine: EmulatedEngine, count: int, start: int = 0) -> list[int]:
    """Decodes `count` tokens after the first `start`, feeding each expected token back."""
    return [step(engine, 10 + i, len(PROMPT) + i, (ANSWER[i],)) for i in range(start, start + count)]


@pytest.fixture
def engine() -> EmulatedEngine:
    return small_engine()


def test_kv_in_float8_takes_half_of_the_memory(engine: EmulatedEngine) -> None:
    narrow = emulate(small_machine(), block_tokens=BLOCK_TOKENS, kv_cache_dtype="fp8_e4m3")
    assert narrow.info.block_bytes * 2 == engine.info.block_bytes
    assert narrow.block_count >= 2 * engine.block_count
    assert narrow.info.differences(engine.info) == ["kv_bytes_per_token", "block_bytes", "kv_cache_dtype"]


def test_prefill_and_decode(engine: EmulatedEngine) -> None:
    assert step(engine, 1, 0, PROMPT, added=True) == ANSWER[0]
    assert decode(engine, 6) == ANSWER[1:7]
    assert engine.runner.wrong_total == 0


def test_a_prompt_in_chunks(engine: EmulatedEngine) -> None:
    chunk = Slice(1, 0, PROMPT[:6], False)
    assert engine.step(Batch(1, (), (new(),), (chunk,)), [TABLE]).token_ids == ()
    assert step(engine, 2, 6, PROMPT[6:]) == ANSWER[0]


def test_stages_pass_activations_on(engine: EmulatedEngine) -> None:
    batch = Batch(1, (), (new(),), (Slice(1, 0, PROMPT, True),))
    hidden = engine.runner.run_stage(batch, [TABLE], None, first_layer=0, last_layer=2)
    assert isinstance(hidden, Activation)
    assert hidden.nbytes == len(PROMPT) * 256 * 2
    later = small_engine()
    result = later.runner.run_stage(batch, [TABLE], hidden, first_layer=2, last_layer=4)
    assert isinstance(result, StepResult)
    assert result.token_ids == (ANSWER[0],)


def test_the_sequence_continues_under_another_leader(engine: EmulatedEngine) -> None:
    step(engine, 1, 0, PROMPT, added=True)
    decode(engine, 2)
    engine.runner.forget_all()
    assert step(engine, 2, len(PROMPT) + 2, (ANSWER[2],), added=True) == ANSWER[3]


@pytest.mark.parametrize("layer", range(4))
def test_kv_of_one_layer_that_never_arrived(engine: EmulatedEngine, layer: int) -> None:
    step(engine, 1, 0, PROMPT, added=True)
    engine.runner.forget_all()
    phantom(engine.memory.kv.layer(layer)).area.set_cell(TABLE[0], 0)
    assert step(engine, 2, len(PROMPT), (ANSWER[0],), added=True) != ANSWER[1]
    assert decode(engine, 2, start=1) != ANSWER[2:4]  # and later tokens are wrong too
    assert engine.runner.wrong_total == 3


def test_a_block_overwritten_by_another_sequence(engine: EmulatedEngine) -> None:
    step(engine, 1, 0, PROMPT, added=True)
    other = NewSequence(2, PROMPT[::-1], (), SamplingParams(seed=1))
    engine.step(Batch(2, (), (other,), (Slice(2, 0, PROMPT[::-1], True),)), [(1, 3, TABLE[2])])
    assert decode(engine, 1) != ANSWER[1:2]


def test_a_layer_with_other_parameters(engine: EmulatedEngine) -> None:
    phantom(engine.memory.parameters.layer(2)[WEIGHTS]).write([1])
    assert step(engine, 1, 0, PROMPT, added=True) != ANSWER[0]
    engine.read_layer(2)
    engine.runner.forget_all()
    assert step(engine, 2, 0, PROMPT, added=True) == ANSWER[0]


def test_the_contents_of_dropped_layers_are_gone(engine: EmulatedEngine) -> None:
    step(engine, 1, 0, PROMPT, added=True)
    before = engine.block_count
    after = engine.memory.drop_layers([2, 3])
    assert after > before
    assert phantom(engine.memory.kv.layer(3)).area.cell(TABLE[0])  # retained until the victims' KV has been sent
    engine.memory.release_retired()
    assert not phantom(engine.memory.kv.layer(3)).area.cell(TABLE[0])
    engine.check()
    report = engine.memory_report()
    assert report.parameter_bytes + report.kv_bytes + report.free_bytes == report.budget_bytes


def test_two_groups_at_a_time_have_separate_marks(engine: EmulatedEngine) -> None:
    """The old group's KV stays intact while the new group writes into blocks of its own, and can be removed
    separately.
    """
    memory = engine.memory
    memory.drop_layers([2, 3])
    memory.release_retired()
    memory.make_room_for_layers([2, 3], block_count=memory.leaving_block_count)
    for layer in (2, 3):
        engine.read_layer(layer)
    old = [phantom(memory.kv.layer(layer)).area for layer in (0, 1)]
    batch = Batch(1, (), (new(),), (Slice(1, 0, PROMPT, False),))
    engine.runner.run_stage(batch, [TABLE], None, first_layer=0, last_layer=2)
    before = [area.cell(TABLE[0]) for area in old]
    assert all(before)
    memory.open_window()
    first = memory.kv.window.first_block
    table = tuple(first + block for block in TABLE)
    other = NewSequence(2, PROMPT[::-1], (), SamplingParams(seed=1))
    engine.step(Batch(2, (), (other,), (Slice(2, 0, PROMPT[::-1], True),)), [table])
    assert [area.cell(TABLE[0]) for area in old] == before
    there = [area.cell(table[0]) for area in old]
    assert there != before
    memory.shrink_leaving(0)
    memory.close_leaving()
    assert not any(area.cell(TABLE[0]) for area in old)
    assert [area.cell(table[0]) for area in old] == there
    assert engine.runner.wrong_total == 0
    engine.check()


def test_a_layer_is_checked_again_only_by_another_group(engine: EmulatedEngine) -> None:
    step(engine, 1, 0, PROMPT, added=True)
    phantom(engine.memory.parameters.layer(2)[WEIGHTS]).write([1])
    chunk = Batch(2, (), (NewSequence(2, PROMPT, (), SamplingParams(seed=1)),), (Slice(2, 0, PROMPT, False),))
    engine.runner.run_stage(chunk, [(11, 12, 13)], None, first_layer=0, last_layer=3)
    assert decode(engine, 1) == ANSWER[1:2]
    assert engine.runner.wrong_total == 0
    engine.runner.forget_all()
    engine.runner.run_stage(chunk, [(11, 12, 13)], None, first_layer=0, last_layer=2)
    assert engine.runner.wrong_total == 0
    engine.runner.run_stage(Batch(3, (), (), chunk.slices), [(11, 12, 13)], None, first_layer=0, last_layer=3)
    assert engine.runner.wrong_total == 1


def test_compaction_moves_contents(engine: EmulatedEngine) -> None:
    step(engine, 1, 0, PROMPT, added=True)
    engine.memory.move([(TABLE[0], 20), (TABLE[1], 21), (TABLE[2], 22)])
    engine.runner.forget_all()
    batch = Batch(2, (), (new((ANSWER[0],)),), (Slice(1, len(PROMPT), (ANSWER[0],), True),))
    assert engine.step(batch, [(20, 21, 22, 23)]).token_ids == (ANSWER[1],)


def test_blocks_that_do_not_exist(engine: EmulatedEngine) -> None:
    with pytest.raises(InvariantViolation, match="is used, but there are"):
        engine.step(Batch(1, (), (new(),), (Slice(1, 0, PROMPT, True),)), [(0, 1, engine.block_count)])


def offline(number: int, first: int, tokens: tuple[int, ...], *, added: bool = False) -> Batch:
    return Batch(number, (), (new(),) if added else (), (Slice(1, first, tokens, True),), safepoint_layers=1)


def test_a_preempted_step_can_be_run_once_more(engine: EmulatedEngine) -> None:
    asked: list[bool] = []

    def preempted() -> bool:
        asked.append(True)
        return len(asked) == 3

    with pytest.raises(Preempted):
        engine.runner.run_stage(
            offline(1, 0, PROMPT, added=True), [TABLE], None, first_layer=0, last_layer=4, preempted=preempted
        )
    assert len(asked) == 3, "asked after each layer but the last"
    assert step(engine, 2, 0, PROMPT) == ANSWER[0]
    assert decode(engine, 6) == ANSWER[1:7]


def test_a_stage_repeats_a_step_that_was_preempted_on_a_later_stage(engine: EmulatedEngine) -> None:
    """The recomputed token is in a block that also holds correct tokens of other steps."""
    later, hidden = small_engine(), None
    for number, (first, tokens, times) in enumerate([(0, PROMPT, 1), (10, ANSWER[:1], 3), (11, ANSWER[1:2], 2)]):
        batch = offline(number, first, tuple(tokens), added=not first)
        for again in range(times):
            given = replace(batch, added=() if again else batch.added)
            hidden = engine.runner.run_stage(given, [TABLE], None, first_layer=0, last_layer=2)
        assert isinstance(hidden, Activation)
        result = later.runner.run_stage(batch, [TABLE], hidden, first_layer=2, last_layer=4)
        assert isinstance(result, StepResult)
        assert result.token_ids == (ANSWER[number],)
    assert engine.runner.wrong_total == later.runner.wrong_total == 0
