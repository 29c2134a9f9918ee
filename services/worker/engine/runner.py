"""Executes batches on a model: the engine's only entry point for the thread that runs its steps."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import (
    IN_FLIGHT,
    Batch,
    LaunchedStep,
    Preempted,
    SequenceId,
    Slice,
    StepResult,
    TokenLogprobs,
)
from services.worker.engine.attention import AttentionBackend, AttentionStep
from services.worker.engine.decode_graphs import DecodeGraphs
from services.worker.engine.implementation import StageModel
from services.worker.engine.lora import AdapterRows, Lora
from services.worker.engine.model_config import ModelFacts
from services.worker.engine.packing import InFlightTokens, PackedStep, Packer
from services.worker.engine.prompt_logprobs import PromptLogprobs
from services.worker.engine.sampler import AnySampler, Choosing, SampleRow
from services.worker.engine.upload import upload
from services.worker.memory.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class _RunningStep:
    """A launched step, whose tokens the device may not have sampled yet."""

    runner: "ModelRunner"
    step_id: int
    rows: Sequence[SampleRow]
    choosing: Choosing | None  # None: no row samples
    started_s: float

    def collect(self) -> StepResult:
        sampled = None if self.choosing is None else self.choosing.collect()
        elapsed_s = self.runner.elapsed_s(self.started_s)
        if sampled is None:
            return StepResult(self.step_id, (), (), elapsed_s)
        logprobs = sampled.logprobs
        if any(logprobs):
            logprobs = self.runner.with_prompts(self.rows, logprobs)
        return StepResult(self.step_id, sampled.token_ids, logprobs, elapsed_s, errors=sampled.errors)


class ModelRunner:
    """Model, attention and sampler behind one call. Used by one thread at a time."""

    def __init__(
        self,
        config: ModelFacts,
        model: StageModel,
        attention: AttentionBackend,
        sampler: AnySampler,
        kv: KvCache,
        graphs: DecodeGraphs | None = None,
        lora: Lora | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._kv = kv
        self.graphs = graphs
        self.lora = lora
        self._adapter_rows: AdapterRows = ()  # of the current step
        self._packer = Packer(kv.shape.block_tokens)
        self._laid_out: tuple[PackedStep, torch.Tensor, torch.Tensor, AttentionStep] | None = None
        self._latest: _RunningStep | None = None
        self._collected_s = 0.0  # time at which a step was last collected
        self._prompts = PromptLogprobs(lambda hidden_RD: self._model.logits(hidden_RD))

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        """The sequences added and not yet removed."""
        return self._sampler.sequence_ids

    def step(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> StepResult:
        """Execute a batch on the whole model; see `run_stage`."""
        result = self.run_stage(batch, block_tables, None, first_layer=0, last_layer=self._config.layer_count)
        assert isinstance(result, StepResult)
        return result

    def run_stage(
        self,
        batch: Batch,
        block_tables: Sequence[Sequence[int]],
        hidden_TD: torch.Tensor | None,
        *,
        first_layer: int,
        last_layer: int,
        preempted: Callable[[], bool] | None = None,
    ) -> StepResult | torch.Tensor:
        """Execute the layers `[first_layer, last_layer)` of a batch.

        `hidden_TD` is the output of the previous stage and is overwritten; None for the first stage. Rows have the same
        order on every stage, as it follows from the slices alone. Returns the hidden states, or the result on the last
        stage.

        `block_tables` is aligned with the batch's slices; each covers at least the slice's last token. A table that is
        the same object as in the previous step is taken to be unchanged.

        `preempted` is polled at the batch's safepoints.

        Raises:
            Preempted: `preempted` returned True. KV of the batch's tokens may have been written.
            InvariantViolation: the batch or a table contradicts an earlier call.
        """
        out = self._start(batch, block_tables, hidden_TD, range(first_layer, last_layer), preempted)
        return out.collect() if isinstance(out, _RunningStep) else out

    def launch(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> LaunchedStep:
        """Launch a batch on the whole model; see `run_stage`. Steps are collected in the order of launch, and a step
        may refer to tokens of the one launched before it.
        """
        launched = self._start(batch, block_tables, None, range(self._config.layer_count), None)
        assert isinstance(launched, _RunningStep)
        return launched

    def elapsed_s(self, started_s: float) -> float:
        """Seconds since the step was launched, or since the step before it was collected if that was later."""
        began_s, self._collected_s = max(started_s, self._collected_s), time.perf_counter()
        return self._collected_s - began_s

    def with_prompts(
        self, rows: Sequence[SampleRow], logprobs: Sequence[TokenLogprobs | None]
    ) -> tuple[TokenLogprobs | None, ...]:
        pairs = zip(rows, logprobs, strict=True)
        return tuple(self._prompts.with_prompt(row.sequence_id, each) for row, each in pairs)

    def _start(
        self,
        batch: Batch,
        block_tables: Sequence[Sequence[int]],
        hidden_TD: torch.Tensor | None,
        layers: range,
        preempted: Callable[[], bool] | None,
    ) -> _RunningStep | torch.Tensor:
        started_s = time.perf_counter()
        first_layer, last_layer = layers.start, layers.stop
        samples = last_layer == self._config.layer_count
        for sequence_id in batch.removed:
            self._sampler.remove(sequence_id)
            self._prompts.remove(sequence_id)
            self._packer.forget(sequence_id)
            if self.lora is not None:
                self.lora.remove(sequence_id)
        if self.lora is not None:
            for new in batch.added:
                self.lora.add(new)
        if samples:
            for new in batch.added:
                self._sampler.add(new)
                self._prompts.add(new)
        if not batch.slices:
            return _RunningStep(self, batch.step_id, (), None, started_s)
        packed = self._packer.pack(batch.slices, block_tables)
        if samples and first_layer == 0:
            packed = self._with_tokens_in_flight(batch.slices, packed)
        if self.lora is not None:
            self.use_adapters(self.lora.rows_of(batch.slices, packed))
        self._kv.guard(packed.blocks_end, range(first_layer, last_layer))
        with torch.inference_mode():
            if batch.safepoint_layers and preempted is not None:
                slices = range(first_layer, last_layer, batch.safepoint_layers)
                hidden_TD = self._compute_slices(packed, hidden_TD, slices, preempted)
            else:
                hidden_TD = self.compute(packed, hidden_TD, first_layer, last_layer)
            if not samples:
                return hidden_TD
            self._prompts.take(batch.slices, packed.first_rows, hidden_TD)
            rows = [SampleRow(s.sequence_id, s.first_position + len(s.token_ids)) for s in batch.slices if s.samples]
            choosing = self._sample(rows, packed, hidden_TD) if rows else None
        self._latest = launched = _RunningStep(self, batch.step_id, rows, choosing, started_s)
        return launched

    def use_adapters(self, rows: AdapterRows) -> None:
        """Set the rows of the next step that have an adapter."""
        if self.lora is not None:
            self.lora.use(rows)
            self._adapter_rows = rows

    def _with_tokens_in_flight(self, slices: Sequence[Slice], packed: PackedStep) -> PackedStep:
        """`packed`, with `in_flight` set if its slices need tokens that the latest step is still sampling."""
        waiting = [i for i, part in enumerate(slices) if part.token_ids[0] == IN_FLIGHT]
        if not waiting:
            return packed
        latest = self._latest
        if latest is None or latest.choosing is None:
            raise InvariantViolation(f"{len(waiting)} tokens are in flight, and no step that samples")
        sources = {row.sequence_id: at for at, row in enumerate(latest.rows)}
        sources_L = np.array([sources[slices[i].sequence_id] for i in waiting], np.int64)
        return replace(
            packed, in_flight=InFlightTokens(packed.first_rows[waiting], sources_L, latest.choosing.token_ids_R)
        )

    def _compute_slices(
        self, packed: PackedStep, hidden_TD: torch.Tensor | None, firsts: range, preempted: Callable[[], bool]
    ) -> torch.Tensor:
        """Compute in slices of layers starting at `firsts`. On a GPU one slice is launched ahead of the running one."""
        launched: deque[torch.cuda.Event] = deque()
        for first in firsts:
            if first != firsts.start and preempted():
                raise Preempted
            hidden_TD = self.compute(packed, hidden_TD, first, min(first + firsts.step, firsts.stop))
            if hidden_TD.is_cuda:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(hidden_TD.device))
                launched.append(event)
                if len(launched) > 1:
                    launched.popleft().synchronize()
        assert hidden_TD is not None
        return hidden_TD

    def _sample(self, rows: Sequence[SampleRow], packed: PackedStep, hidden_TD: torch.Tensor) -> Choosing:
        """Prepare sampling while a device computes the layers, and launch it."""
        prepared = self._sampler.prepare(rows)
        sample_rows_R, *uploaded = upload([packed.sample_rows, *prepared.arrays], hidden_TD.device)
        logits_RV = self._model.logits(hidden_TD.index_select(0, sample_rows_R))
        return prepared.launch(uploaded, logits_RV)

    def compute(
        self, packed: PackedStep, hidden_TD: torch.Tensor | None, first_layer: int, last_layer: int
    ) -> torch.Tensor:
        """Hidden states after the layers, which the next step may overwrite. Call it in inference mode."""
        device = self._kv.layer(0).device
        if hidden_TD is not None:
            if hidden_TD.is_cuda:  # allocated on another stream
                hidden_TD.record_stream(torch.cuda.current_stream(hidden_TD.device))
            hidden_TD = hidden_TD.to(device)  # a link delivers them to host memory
        if self.graphs is not None and not self._adapter_rows:
            replayed_TD = self.graphs.run_layers(hidden_TD, packed, range(first_layer, last_layer))
            if replayed_TD is not None:
                return replayed_TD
        if self._laid_out is None or self._laid_out[0] is not packed:  # once for all slices of the layers
            token_ids_T, positions_T = upload([packed.token_ids_T, packed.positions_T], device)
            if packed.in_flight is not None:
                packed.in_flight.put(token_ids_T)
            self._laid_out = packed, token_ids_T, positions_T, self._attention.prepare(packed)
        _, token_ids_T, positions_T, attention = self._laid_out
        if last_layer == self._config.layer_count:
            self._laid_out = None
        return self._model.run_layers(
            self._model.embed(token_ids_T, positions_T) if hidden_TD is None else hidden_TD,
            positions_T,
            attention,
            first_layer=first_layer,
            last_layer=last_layer,
        )

    def forget_all(self) -> None:
        """Remove all sequences, because the following batches are from another leader, which adds its own sequences."""
        for sequence_id in self._sampler.sequence_ids:
            self._sampler.remove(sequence_id)
            self._prompts.remove(sequence_id)
        self._latest = None
        self._packer.forget_all()
        if self.lora is not None:
            self.lora.forget_all()
