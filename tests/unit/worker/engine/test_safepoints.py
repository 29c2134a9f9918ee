"""A step that is preempted between two slices of layers leaves nothing behind that affects a later step."""

import contextlib
from functools import partial
from pathlib import Path

import pytest

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NewSequence, Preempted, Slice, StepResult
from services.worker.engine.load import Engine, load_engine
from services.worker.ranks.channel import RankLog
from services.worker.ranks.load import load_ranked
from tools.model.tiny import make_tiny

LAYERS = 4
PROMPT = tuple(range(20, 53))
SAMPLING = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, max_len=128)


def _answer(engine: Engine, safepoint_layers: int, preempted_at: int) -> list[object]:
    """Tokens with their log-probabilities. Each step is preempted once, `preempted_at` slices after its start."""
    table = tuple(range(engine.memory.kv.window.first_block, engine.memory.kv.window.first_block + 8))
    found, first, tokens, left, step_id = list[object](), 0, PROMPT, -1, 0
    added: tuple[NewSequence, ...] = (NewSequence(1, PROMPT, (), SAMPLING),)

    def preempted() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    while len(found) < 6:
        count = min(len(tokens), 20)
        part = Slice(1, first, tokens[:count], first + count >= len(PROMPT))
        out = None
        for slice_count in (preempted_at, -1):
            left, step_id = slice_count, step_id + 1
            batch, added = Batch(step_id, (), added, (part,), safepoint_layers=safepoint_layers), ()
            with contextlib.suppress(Preempted):
                out = engine.runner.run_stage(
                    batch, [table], None, first_layer=0, last_layer=LAYERS, preempted=preempted
                )
            if out is not None:
                break
        assert isinstance(out, StepResult)
        first += count
        tokens = tokens[count:]
        if part.samples:
            found.append((out.token_ids, out.logprobs))
            tokens = out.token_ids
    return found


@pytest.mark.parametrize(("safepoint_layers", "preempted_at"), [(1, 1), (1, 3), (2, 1), (3, 1), (1, -1)])
def test_tokens_are_those_of_whole_steps(model: Path, safepoint_layers: int, preempted_at: int) -> None:
    with load_engine(model, device_memory_bytes=8 << 20, dtype="float64") as engine:
        whole = _answer(engine, 0, -1)
    with load_engine(model, device_memory_bytes=8 << 20, dtype="float64") as engine:
        assert _answer(engine, safepoint_layers, preempted_at) == whole


def test_ranks_are_preempted_together(model: Path) -> None:
    ranked = load_ranked(
        partial(load_engine, model, device_memory_bytes=8 << 20, dtype="float64"), ["cpu", "cpu"], RankLog()
    )
    with ranked.engine as engine:
        whole = _answer(engine, 0, -1)
        engine.runner.run_stage(Batch(99, (1,), (), ()), (), None, first_layer=0, last_layer=LAYERS)
        assert _answer(engine, 1, 2) == whole
