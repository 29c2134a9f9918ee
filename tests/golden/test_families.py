"""Every family of decoders: the tokens of `transformers`, alone, in two stages, through a drop and after a restore."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from ballast.common.errors import ConfigError
from services.worker.core.batch import Batch, NewSequence, Slice, StepResult
from services.worker.engine.load import Engine, load_engine
from tests.support.engine import GREEDY
from tests.support.families import PAGE, REFUSED, chosen, greedy_alone, table_line, write_family
from tests.support.reference import NEAR_TIE, Reference

pytestmark = [pytest.mark.golden]

LENGTHS = (5, 23, 40)
EACH = 4  # tokens alone, in two stages, and after the restore
CHUNK = 11
MEMORY_BYTES = 8 << 20


def load(folder: Path) -> Engine:
    return load_engine(
        folder, dtype="float32", device_memory_bytes=MEMORY_BYTES, model_impl="transformers", max_model_len=128
    )


class Serving:
    """Sequences on one instance, on two stages, or on one again. Tokens of the reference are fed back."""

    def __init__(
        self, engines: Sequence[Engine], prompts: Sequence[tuple[int, ...]], wanted: Sequence[Reference]
    ) -> None:
        self._engines = engines
        self._wanted = wanted
        self._tokens = [prompt + one.token_ids for prompt, one in zip(prompts, wanted, strict=True)]
        self._given = [len(prompt) for prompt in prompts]  # tokens that are known
        self._done = [0] * len(prompts)  # tokens with KV
        self._added = False
        self._step = 0
        self.near_ties = 0
        size = engines[0].block_tokens
        counts = [-(-len(tokens) // size) for tokens in self._tokens]
        order = random.Random(5).sample(range(sum(counts)), sum(counts))
        self._tables = [tuple(order.pop() for _ in range(count)) for count in counts]

    def run(self, count: int, borders: Sequence[int]) -> None:
        """So many tokens of each, by as many engines as there are ranges between the borders."""
        ends = [given + count for given in self._given]
        while any(given < end for given, end in zip(self._given, ends, strict=True)):
            slices = list(self._slices(ends))
            slices.sort(key=lambda part: len(part.token_ids) > 1)
            for part, token in zip([p for p in slices if p.samples], self._compute(slices, borders), strict=True):
                self._take(part.sequence_id, token)

    def again(self, window_start: int) -> None:
        """All KV is computed anew, in blocks from there on."""
        low = min(block for table in self._tables for block in table)
        self._tables = [tuple(block - low + window_start for block in table) for table in self._tables]
        self._done = [0] * len(self._done)

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


@pytest.mark.parametrize("name", chosen())
def test_tokens_of_a_family_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path)
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(3, 380) for _ in range(length)) for length in LENGTHS]
    wanted = greedy_alone(folder, prompts, 3 * EACH)
    with ExitStack() as engines:
        first, second = (engines.enter_context(load(folder)) for _ in range(2))
        assert first.implementation.pipelines
        extras = sorted({extra for kind in first.implementation.kinds for extra in kind.extras})
        assert table_line(name, first.info.architecture, extras) in PAGE.read_text()
        layers, border = first.config.layer_count, 1 + len(name) % 3
        serving = Serving((first, second), prompts, wanted)
        serving.run(EACH, (0, layers))

        # A drop: the second one takes the last layers with their KV, each gives up what the other one has.
        for layer in range(border, layers):
            blocks = torch.tensor(serving.blocks)
            second.memory.kv.layer(layer)[blocks] = first.memory.kv.layer(layer)[blocks]
        for engine, dropped in ((first, range(border, layers)), (second, range(border))):
            engine.memory.drop_layers(dropped)
            engine.memory.release_retired()
            engine.check()
        second_sampler = serving_of(second, prompts)
        second.runner.step(second_sampler, [])
        serving.run(EACH, (0, border, layers))

        # A restore: from the file, to the bytes that were there before.
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
        assert serving.near_ties <= 1


def serving_of(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> Batch:
    """Tells an engine that has not sampled for them of the sequences."""
    return Batch(0, (), tuple(NewSequence(i, prompt, (), GREEDY) for i, prompt in enumerate(prompts)), ())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_that_cannot_be_served_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path)
    with pytest.raises(ConfigError, match=REFUSED[name]):
        load(folder)
