"""Executes batches by waiting, and samples tokens that are a function of the prompt.

Marks of KV and layers are verified (see `phantom`). A sequence whose KV was wrong or missing once gets wrong tokens
from then on.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ballast.common.errors import InvariantViolation
from ballast.service.logs import get_logger
from services.worker.core.batch import Batch, NewSequence, SequenceId, Slice, StepResult, TokenLogprobs
from services.worker.emulation.clock import GpuClock
from services.worker.emulation.machine import Machine
from services.worker.emulation.phantom import Area, phantom
from services.worker.emulation.tokens import next_token, prefix_hash, wrong_token

if TYPE_CHECKING:
    from services.worker.memory.device import DeviceMemory


class Activation:
    """Stand-in for hidden states: their size, and which slices had errors in earlier stages."""

    __slots__ = ("at_s", "nbytes", "wrong")

    def __init__(self, nbytes: int, wrong: bytes, at_s: float = 0.0) -> None:
        self.nbytes = nbytes
        self.wrong = wrong  # one byte per slice
        self.at_s = at_s  # ideal arrival: see `clock`


class EmulatedActivations:
    """An `ActivationStore` (`services.worker.pipeline.context`) that stores only sizes."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._row_bytes = 0

    def slot_count(self, hidden: Activation) -> int:
        return self._size_bytes // self._row_bytes if self._row_bytes else sys.maxsize

    def write(self, hidden: Activation, rows: Sequence[int], slots: Sequence[int]) -> None:
        self._row_bytes = self._row_bytes or max(1, hidden.nbytes // (rows[-1] + 1))

    def read(self, slots: Sequence[int]) -> Activation:
        return Activation(len(slots) * self._row_bytes, bytes(1))


class _KnownSequence:
    """State of a sequence, with the hash of its first `position` tokens. `before`: position, hash and mark of the
    partial block before its last slice, needed if that slice is repeated.
    """

    __slots__ = ("before", "hash", "is_wrong", "logprobs", "position", "scored", "start")

    def __init__(self, new: NewSequence) -> None:
        self.start = array("q", (*new.prompt_token_ids, *new.output_token_ids))
        self.position = self.hash = 0
        self.before: tuple[int, int, int] = (0, 0, 0)
        self.is_wrong = False
        self.logprobs = new.sampling.logprobs is not None
        scores = new.sampling.prompt_logprobs is not None and not new.output_token_ids
        self.scored = new.prompt_token_ids if scores else ()


class Marks:
    """Verifies and writes a batch's marks of KV and parameters (see `phantom`). Engine thread only."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._block_tokens = memory.kv.shape.block_tokens
        self.known: dict[SequenceId, _KnownSequence] = {}
        self._areas: list[Area] = []
        for layer in range(memory.kv.shape.layer_count):
            area = phantom(memory.kv.layer(layer)).area
            area.divide(memory.kv.shape.block_bytes, memory.kv.windows[1].first_block)
            self._areas.append(area)
        self._checked_layers: set[int] = set()
        self._wrong_layers: set[int] = set()
        self._layers_are_wrong = False
        self.wrong_total = 0  # slices that read a wrong mark

    def take_in(self, batch: Batch) -> None:
        """Forget the batch's removed sequences and add its new ones."""
        for sequence_id in batch.removed:
            self.known.pop(sequence_id, None)
        for new in batch.added:
            if new.sequence_id in self.known:
                raise InvariantViolation(f"sequence {new.sequence_id} is added twice")
            self.known[new.sequence_id] = _KnownSequence(new)

    def compute(self, batch: Batch, tables: Sequence[Sequence[int]], before: bytes, layers: range) -> bytes:
        """Verify and write the marks of a batch. Returns a byte per slice: 1 if there was an error here or, according
        to `before`, in earlier stages.
        """
        self._memory.kv.guard(max(max(table) for table in tables) + 1, layers)
        self._check_layers(layers)
        wrong = bytearray(before)
        for i, (part, table) in enumerate(zip(batch.slices, tables, strict=True)):
            wrong[i] |= not self._compute(part, table, layers)
        return bytes(wrong)

    def forget_all(self) -> None:
        """Forget all sequences and verified layers, because another leader's batches follow and add every sequence
        anew.
        """
        self.known.clear()
        self._checked_layers.clear()
        self._wrong_layers.clear()

    def _compute(self, part: Slice, table: Sequence[int], layers: range) -> bool:
        """Verify and write the marks of a slice. Returns False if a read was wrong now or earlier."""
        known = self.known.get(part.sequence_id)
        if known is None:
            raise InvariantViolation(f"sequence {part.sequence_id} has not been added")
        first, size, left = part.first_position, self._block_tokens, 0
        # The slice is repeated if a later stage was preempted.
        if first and first != known.position and first == known.before[0]:
            known.position, known.hash, left = known.before
        if first != known.position:
            known.is_wrong |= not self._read_all(known, first, table, layers)
        elif first:
            block, marks = table[(first - 1) // size], (known.hash, left) if left else (known.hash,)
            first_mark, last_mark = self._areas[layers[0]].cell(block), self._areas[layers[-1]].cell(block)
            known.is_wrong |= first_mark not in marks or last_mark not in marks
        if self._layers_are_wrong:
            known.is_wrong = True
        self._write(known, part, table, layers)
        self.wrong_total += known.is_wrong
        return not known.is_wrong

    def _read_all(self, known: _KnownSequence, first: int, table: Sequence[int], layers: range) -> bool:
        """Verify every block of a prefix in every layer, after it was computed elsewhere or in an earlier layout. The
        last block may already contain more tokens, from a batch that a later stage has lost.
        """
        if first > len(known.start):
            raise InvariantViolation(f"a sequence of {len(known.start)} tokens continues at position {first}")
        marks, size, so_far = list[int](), self._block_tokens, 0
        for at in range(0, first, size):
            so_far = prefix_hash(known.start[at : min(at + size, first)], so_far)
            marks.append(so_far)
        known.hash, known.position = so_far, first
        at, further = first - first % size, {so_far}
        if first % size:
            before = marks[-2] if len(marks) > 1 else 0
            ends = range(first + 1, min(len(known.start), at + size) + 1)
            further |= {prefix_hash(known.start[at:end], before) for end in ends}
        for layer in layers:
            cell = self._areas[layer].cell
            found = [cell(block) for block in table[: len(marks)]]
            if len(found) != len(marks) or found[:-1] != marks[:-1] or not further.issuperset(found[-1:]):
                get_logger().error("a block has KV of another sequence, or no KV", layer=layer, tokens=first)
                return False
        return True

    def _write(self, known: _KnownSequence, part: Slice, table: Sequence[int], layers: range) -> None:
        size, at, end = self._block_tokens, part.first_position, part.first_position + len(part.token_ids)
        before, mark, left = (at, known.hash), known.hash, 0
        while at < end:
            until = min(end, at - at % size + size)
            mark = prefix_hash(part.token_ids[at - part.first_position : until - part.first_position], mark)
            block = table[at // size]
            for layer in layers:
                self._areas[layer].set_cell(block, mark)
            left = mark if at == part.first_position and at % size else left
            at = until
        known.hash, known.position, known.before = mark, end, (*before, left)

    def _check_layers(self, layers: range) -> None:
        """Verify each layer's parameters, only once per layout because they are not written to afterwards."""
        if not self._checked_layers.issuperset(layers):
            parameters = self._memory.parameters
            fresh = [i for i in layers if i not in self._checked_layers]
            wrong = [i for i in fresh if phantom(parameters.layer(i)[WEIGHTS]).read() != [layer_mark(i)]]
            self._checked_layers.update(fresh)
            self._wrong_layers.update(wrong)
            if wrong:
                get_logger().error("wrong parameters", layers=wrong)
        self._layers_are_wrong = not self._wrong_layers.isdisjoint(layers)


class EmulatedRunner:
    """A `StageEngine` that computes nothing. Used by the engine thread only."""

    def __init__(self, machine: Machine, memory: DeviceMemory) -> None:
        self._machine = machine
        self._layer_count = machine.model.layer_count
        self._vocab_size = machine.model.vocab_size
        self._row_bytes = machine.model.hidden_size * 2
        self._marks = Marks(memory)
        self.clock = GpuClock()

    @property
    def wrong_total(self) -> int:
        """Number of slices that read wrong KV or parameters."""
        return self._marks.wrong_total

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return tuple(self._marks.known)

    def step(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> StepResult:
        """Execute a batch on the whole model."""
        result = self.run_stage(batch, block_tables, None, first_layer=0, last_layer=self._layer_count)
        assert isinstance(result, StepResult)
        return result

    def run_stage(
        self,
        batch: Batch,
        block_tables: Sequence[Sequence[int]],
        hidden: Activation | None,
        *,
        first_layer: int,
        last_layer: int,
        preempted: Callable[[], bool] = lambda: False,
    ) -> StepResult | Activation:
        """See `engine.runner.ModelRunner.run_stage`."""
        began_s = time.monotonic()
        self._marks.take_in(batch)
        if not batch.slices:
            return StepResult(batch.step_id, (), (), time.monotonic() - began_s)
        if (first_layer == 0) != (hidden is None):
            raise InvariantViolation(f"layers from {first_layer} on with{'out' if hidden is None else ''} activations")
        layers = range(first_layer, last_layer)
        before = hidden.wrong if hidden is not None else bytes(len(batch.slices))
        is_first, is_last = first_layer == 0, last_layer == self._layer_count
        seconds = self._machine.execution.stage_s(batch.slices, len(layers), is_first=is_first, is_last=is_last)
        given_s, step = hidden.at_s if hidden is not None else None, batch.safepoint_layers
        if step:  # wait before writing: a preempted step must not have written anything
            self.clock.run(seconds, began_s, given_s, -(-len(layers) // step), preempted)
        wrong = self._marks.compute(batch, block_tables, before, layers)
        out = self._sample(batch, wrong, seconds) if is_last else self._hidden(batch, wrong)
        if not step:
            self.clock.run(seconds, began_s, given_s)
        return out

    def forget_all(self) -> None:
        """See `Marks.forget_all`."""
        self._marks.forget_all()

    # ------------------------------------------------------------ output

    def _hidden(self, batch: Batch, wrong: bytes) -> Activation:
        rows = sum(len(part.token_ids) for part in batch.slices)
        return Activation(rows * self._row_bytes, wrong)

    def _sample(self, batch: Batch, wrong: bytes, seconds: float) -> StepResult:
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for part, is_wrong in zip(batch.slices, wrong, strict=True):
            if not part.samples:
                continue
            known = self._marks.known[part.sequence_id]
            token = next_token(known.hash, known.position, self._vocab_size)
            tokens.append(wrong_token(token, self._vocab_size) if is_wrong else token)
            prompt = tuple(TokenLogprobs(token_id, 0.0, ()) for token_id in known.scored)
            logprobs.append(TokenLogprobs(tokens[-1], 0.0, (), prompt) if known.logprobs else None)
            known.scored = ()
        return StepResult(batch.step_id, tuple(tokens), tuple(logprobs), seconds)


WEIGHTS = "weights"  # name of a layer's only parameter


def layer_mark(layer: int) -> int:
    """Return the mark of a layer's parameters."""
    return layer + 1
