"""Every decoder family and every kind of quantised checkpoint generates the tokens of `transformers`: on one worker, in
two and three stages, through drops, exchanges of KV and parameters, a restore, a replay and a live migration.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from ballast.common.errors import ConfigError
from services.worker.core.batch import Batch, NewSequence, Slice, StepResult
from services.worker.engine.load import Engine, load_engine
from tests.support.engine import GREEDY
from tests.support.families import FAMILIES, PAGE, REFUSED, greedy_alone, table_line, write_family
from tests.support.quantised import dense_of
from tests.support.reference import NEAR_TIE, Reference

pytestmark = [pytest.mark.golden]

LENGTHS = (5, 23, 40)
EACH = 3  # tokens generated in each of the five configurations
CHUNK = 11
MEMORY_BYTES = 8 << 20


def load(folder: Path) -> Engine:
    return load_engine(
        folder, dtype="float32", device_memory_bytes=MEMORY_BYTES, model_impl="transformers", max_model_len=128
    )


class Serving:
    """Serves sequences on one or several engines (pipeline stages). Outputs are teacher-forced with the reference's
    tokens.
    """

    def __init__(
        self, engines: Sequence[Engine], prompts: Sequence[tuple[int, ...]], wanted: Sequence[Reference]
    ) -> None:
        self._engines = engines
        self._wanted = wanted
        self._tokens = [prompt + one.token_ids for prompt, one in zip(prompts, wanted, strict=True)]
        self._given = [len(prompt) for prompt in prompts]  # known tokens per sequence
        self._done = [0] * len(prompts)  # tokens with computed KV per sequence
        self._added = False
        self._step = 0
        self.near_ties = 0
        self._tables = self._new_tables(5)

    def _new_tables(self, seed: int) -> list[tuple[int, ...]]:
        counts = [-(-len(tokens) // self._engines[0].block_tokens) for tokens in self._tokens]
        order = random.Random(seed).sample(range(sum(counts)), sum(counts))
        return [tuple(order.pop() for _ in range(count)) for count in counts]

    def run(self, count: int, borders: Sequence[int]) -> None:
        """Generates `count` tokens for each sequence. Engine i computes the layers from `borders[i]` to `borders[i +
        1]`.
        """
        ends = [given + count for given in self._given]
        while any(given < end for given, end in zip(self._given, ends, strict=True)):
            slices = list(self._slices(ends))
            slices.sort(key=lambda part: len(part.token_ids) > 1)
            for part, token in zip([p for p in slices if p.samples], self._compute(slices, borders), strict=True):
                self._take(part.sequence_id, token)

    def again(self, window_start: int) -> None:
        """Marks all KV for recomputation, in blocks that start at `window_start`."""
        low = min(block for table in self._tables for block in table)
        self._tables = [tuple(block - low + window_start for block in table) for table in self._tables]
        self._done = [0] * len(self._done)

    def migrate(self, target: Engine, meanwhile: Callable[[], None]) -> None:
        """Migrates all sequences to another engine, into differently numbered blocks. Full blocks are copied before
        `meanwhile`, which lets the sequences grow; the rest is copied after it.
        """
        source, size = self._engines[0], target.block_tokens
        tables = self._new_tables(6)

        def copy(first: Sequence[int]) -> list[int]:
            ends = [done // size for done in self._done]
            for before, after, begin in zip(self._tables, tables, first, strict=True):
                for layer in range(source.config.layer_count):
                    old, new = source.memory.kv.layer(layer), target.memory.kv.layer(layer)
                    new[torch.tensor(after[begin:])] = old[torch.tensor(before[begin:])]
            return ends

        moved = copy([0] * len(tables))
        meanwhile()
        copy(moved)
        self._tables, self._engines = tables, [target]

    @property
    def blocks(self) -> list[int]:
        return [block for table in self._tables for block in table]

    def _slices(self, ends: Sequence[int]) -> Iterator[Slice]:
        for i, tokens in enumerate(self._tokens):
            if self._given[i] < ends[i]:
                end = min(self._given[i], self._done[i] + CHUNK)
                yield Slice(i, self._done[i], tokens[self._done[i] : end], samples=end == self._given[i])
                self._done[i] = end

    def _compute(self, slices: Sequence[Slice], borders: Sequence[int]) -> tuple[int, ...]:
        tables = [self._tables[part.sequence_id] for part in slices]
        added: tuple[NewSequence, ...] = ()
        if not self._added:
            prompts = [tokens[:given] for tokens, given in zip(self._tokens, self._given, strict=True)]
            added = tuple(NewSequence(i, prompt, (), GREEDY) for i, prompt in enumerate(prompts))
        hidden: StepResult | torch.Tensor | None = None
        for engine, first, last in zip(self._engines, borders, borders[1:], strict=False):
            assert not isinstance(hidden, StepResult)
            batch = Batch(self._step, (), added, tuple(slices))
            hidden = engine.runner.run_stage(batch, tables, hidden, first_layer=first, last_layer=last)
        self._step, self._added = self._step + 1, True
        assert isinstance(hidden, StepResult)
        return hidden.token_ids

    def _take(self, i: int, token: int) -> None:
        at = self._given[i] - (len(self._tokens[i]) - len(self._wanted[i].token_ids))
        if token != self._wanted[i].token_ids[at]:
            assert self._wanted[i].gaps[at] < NEAR_TIE, f"sequence {i}, output {at}: {token}"
            self.near_ties += 1
        self._given[i] += 1


@pytest.mark.rotating(5)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_tokens_of_a_family_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path)
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(3, 380) for _ in range(length)) for length in LENGTHS]
    wanted = greedy_alone(dense_of(folder), prompts, 5 * EACH)
    with ExitStack() as engines:
        first, second, third, last = (engines.enter_context(load(folder)) for _ in range(4))
        assert first.implementation.pipelines
        extras = sorted({extra for kind in first.implementation.kinds for extra in kind.extras})
        assert table_line(name, first.info.architecture, extras) in PAGE.read_text()
        layers, border = first.config.layer_count, 1 + len(name) % 2
        end = border + 1
        serving = Serving((first, second, third), prompts, wanted)
        for engine in (second, third, last):
            engine.runner.step(sequences(prompts), [])
        serving.run(EACH, (0, layers))

        # Two stages: the second one takes over the last layers with their KV, and each stage drops the layers of the
        # other.
        hand_over(serving, first, second, range(border, layers))
        drop(second, range(border))
        serving.run(EACH, (0, border, layers))

        # Three stages: the exchange involves layers that have only been loaded from the checkpoint.
        hand_over(serving, second, third, range(end, layers))
        drop(third, range(end))
        serving.run(EACH, (0, border, end, layers))

        # A restore: dropped layers are reloaded from the checkpoint, byte for byte. All KV is recomputed, as in a
        # replay.
        memory = first.memory
        memory.make_room_for_layers(range(border, layers), block_count=1)
        for layer in range(border, layers):
            first.read_layer(layer)
            assert memory.parameters.layer_checksum(layer) == memory.parameters.loaded_checksums[layer]
        memory.open_window()
        memory.close_leaving()
        first.check()
        serving.again(memory.kv.window.first_block)
        serving.run(EACH, (0, layers))

        serving.migrate(last, lambda: serving.run(1, (0, layers)))
        serving.run(EACH - 1, (0, layers))
        assert serving.near_ties <= 1


def hand_over(serving: Serving, giver: Engine, taker: Engine, layers: range) -> None:
    """Copies the KV of `layers` from `giver` to `taker`; `giver` then drops these layers."""
    blocks = torch.tensor(serving.blocks)
    for layer in layers:
        taker.memory.kv.layer(layer)[blocks] = giver.memory.kv.layer(layer)[blocks]
    drop(giver, layers)


def drop(engine: Engine, layers: range) -> None:
    engine.memory.drop_layers(layers)
    engine.memory.release_retired()
    engine.check()


def sequences(prompts: Sequence[tuple[int, ...]]) -> Batch:
    """A batch that registers the sequences with an engine which has not sampled for them yet."""
    return Batch(0, (), tuple(NewSequence(i, prompt, (), GREEDY) for i, prompt in enumerate(prompts)), ())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_unsupported_family_is_refused_with_a_clear_error(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path)
    with pytest.raises(ConfigError, match=REFUSED[name]):
        load(folder)
