"""Executes batches on a whole model: the engine's only entry for the thread that steps it."""

import time
from collections.abc import Sequence

import torch

from services.worker.core.batch import Batch, SequenceId, StepResult
from services.worker.engine.attention import AttentionBackend
from services.worker.engine.model import Model
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.packing import PackedStep, Packer
from services.worker.engine.sampler import Sampler, SampleRow
from services.worker.memory.kv_cache import KvCache


class ModelRunner:
    """Model, attention and sampler behind one call. Used by one thread at a time."""

    def __init__(
        self, config: ModelConfig, model: Model, attention: AttentionBackend, sampler: Sampler, kv: KvCache
    ) -> None:
        self._config = config
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._kv = kv
        self._packer = Packer(kv.shape.block_tokens)

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        """The sequences that were added and not removed."""
        return self._sampler.sequence_ids

    def step(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> StepResult:
        """Execute a batch. `block_tables` is aligned with its slices; each covers at least the slice's last token.

        A table that is the same object as in the step before is taken to be unchanged.

        Raises:
            InvariantViolation: the batch or a table contradicts what this runner was told before.
        """
        started_s = time.perf_counter()
        for sequence_id in batch.removed:
            self._sampler.remove(sequence_id)
            self._packer.forget(sequence_id)
        for new in batch.added:
            self._sampler.add(new)
        if not batch.slices:
            return StepResult(batch.step_id, (), (), time.perf_counter() - started_s)
        rows = [SampleRow(s.sequence_id, s.first_position + len(s.token_ids)) for s in batch.slices if s.samples]
        packed = self._packer.pack(batch.slices, block_tables)
        self._kv.guard(packed.blocks_end)
        with torch.inference_mode():
            logits_RV = self._forward(packed)
            sampled = self._sampler.sample(rows, logits_RV) if rows else None
        token_ids, logprobs = (sampled.token_ids, sampled.logprobs) if sampled else ((), ())
        return StepResult(batch.step_id, token_ids, logprobs, time.perf_counter() - started_s)

    def _forward(self, packed: PackedStep) -> torch.Tensor:
        """logits_RV of the rows that sample."""
        device = self._kv.layer(0).device
        token_ids_T = torch.from_numpy(packed.token_ids_T).to(device)
        positions_T = torch.from_numpy(packed.positions_T).to(device)
        hidden_TD = self._model.run_layers(
            self._model.embed(token_ids_T),
            positions_T,
            self._attention.prepare(packed),
            first_layer=0,
            last_layer=self._config.layer_count,
        )
        sample_rows = torch.from_numpy(packed.sample_rows).to(device)
        return self._model.logits(hidden_TD.index_select(0, sample_rows))
