"""Executes batches on a whole model: the engine's only entry for the thread that steps it."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from services.worker.core.batch import Batch, SequenceId, StepResult
from services.worker.engine.attention import AttentionBackend
from services.worker.engine.decode_graphs import DecodeGraphs
from services.worker.engine.model import Model
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.packed_model import PackedModel
from services.worker.engine.packing import PackedStep, Packer
from services.worker.engine.prompt_logprobs import PromptLogprobs
from services.worker.engine.sampler import AnySampler, SampleRow
from services.worker.engine.upload import upload
from services.worker.memory.kv_cache import KvCache


class ModelRunner:
    """Model, attention and sampler behind one call. Used by one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        model: Model | PackedModel,
        attention: AttentionBackend,
        sampler: AnySampler,
        kv: KvCache,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._kv = kv
        self.graphs = graphs
        self._packer = Packer(kv.shape.block_tokens)
        self._prompts = PromptLogprobs(lambda hidden_RD: self._model.logits(hidden_RD))

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        """The sequences that were added and not removed."""
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
    ) -> StepResult | torch.Tensor:
        """Execute the layers `[first_layer, last_layer)` of a batch.

        `hidden_TD` comes from the stage before and is changed; None for the first stage. Rows have the same order on
        every stage: it follows from the slices alone. Returns the hidden states, or from the last stage the result.

        `block_tables` is aligned with the batch's slices; each covers at least the slice's last token. A table that is
        the same object as in the step before is taken to be unchanged.

        Raises:
            InvariantViolation: the batch or a table contradicts what this runner was told before.
        """
        started_s = time.perf_counter()
        samples = last_layer == self._config.layer_count
        for sequence_id in batch.removed:
            self._sampler.remove(sequence_id)
            self._prompts.remove(sequence_id)
            self._packer.forget(sequence_id)
        if samples:
            for new in batch.added:
                self._sampler.add(new)
                self._prompts.add(new)
        if not batch.slices:
            return StepResult(batch.step_id, (), (), time.perf_counter() - started_s)
        packed = self._packer.pack(batch.slices, block_tables)
        self._kv.guard(packed.blocks_end, range(first_layer, last_layer))
        rows: list[SampleRow] = []
        if samples:
            rows = [SampleRow(s.sequence_id, s.first_position + len(s.token_ids)) for s in batch.slices if s.samples]
        prepared = self._sampler.prepare(rows) if rows else None
        with torch.inference_mode():
            arrays = () if prepared is None else prepared.arrays
            hidden_TD, sample_rows_R, *uploaded = self.compute(packed, hidden_TD, first_layer, last_layer, arrays)
            if not samples:
                return hidden_TD
            self._prompts.take(batch.slices, packed.first_rows, hidden_TD)
            sampled = None
            if prepared is not None:
                logits_RV = self._model.logits(hidden_TD.index_select(0, sample_rows_R))
                sampled = prepared.launch(uploaded, logits_RV).collect()
        elapsed_s = time.perf_counter() - started_s
        if sampled is None:
            return StepResult(batch.step_id, (), (), elapsed_s)
        logprobs = sampled.logprobs
        if any(logprobs):
            pairs = zip(rows, logprobs, strict=True)
            logprobs = tuple(self._prompts.with_prompt(row.sequence_id, each) for row, each in pairs)
        return StepResult(batch.step_id, sampled.token_ids, logprobs, elapsed_s, errors=sampled.errors)

    def compute(
        self,
        packed: PackedStep,
        hidden_TD: torch.Tensor | None,
        first_layer: int,
        last_layer: int,
        arrays: Sequence[np.ndarray] = (),
    ) -> tuple[torch.Tensor, ...]:
        """Hidden states behind the layers, where the rows are that are sampled, and the arrays, which go to the device
        with all else. In inference mode.
        """
        token_ids_T, positions_T, *others = upload(
            [packed.token_ids_T, packed.positions_T, packed.sample_rows, *arrays], self._kv.layer(0).device
        )
        if hidden_TD is None:
            hidden_TD = self._model.embed(token_ids_T)
        elif hidden_TD.is_cuda:  # brought on another stream, whose memory it is
            hidden_TD.record_stream(torch.cuda.current_stream(hidden_TD.device))
        hidden_TD = hidden_TD.to(positions_T.device)  # a link gives them where it has received them
        if self.graphs is not None:
            replayed_TD = self.graphs.run_layers(hidden_TD, positions_T, packed, range(first_layer, last_layer))
            if replayed_TD is not None:
                return replayed_TD, *others
        attention = self._attention.prepare(packed)
        hidden_TD = self._model.run_layers(
            hidden_TD, positions_T, attention, first_layer=first_layer, last_layer=last_layer
        )
        return hidden_TD, *others

    def forget_all(self) -> None:
        """Another leader's batches follow: they bring every sequence anew."""
        for sequence_id in self._sampler.sequence_ids:
            self._sampler.remove(sequence_id)
            self._prompts.remove(sequence_id)
        self._packer.forget_all()
