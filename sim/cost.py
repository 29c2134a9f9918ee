"""How long a stage takes for a batch.

`Roofline` computes it from the machine: the parameters of a layer are read once for each batch, or its tokens are
computed, whichever takes longer; attention is bound by computing for chunks of a prompt and by reading KV for decodes.
Equation 1 of KunServe has one coefficient for both kinds of attention, which fits chunks and makes decodes of long
sequences far too cheap (a token of KV that a decode reads takes as long as computing 20 pairs of a prompt on an A800).
`Profiled` takes the paper's equations 1 to 3 as they are, with coefficients that somebody has measured.
"""

from typing import NamedTuple, Protocol

import numpy as np

from services.worker.core.batch import Batch, Slice
from services.worker.policy.cost import Chunk, CostModel
from services.worker.policy.cost_fit import cost_of, relative_fit, terms_of
from sim.hardware import ELEMENT_BYTES, Cluster, ModelSpec, Timings

_PREFIXES = (0, 512, 2048, 8192)
_COUNTS = (16, 64, 256, 1024, 2048)
_DECODES = (1, 8, 32, 128, 256)
_DIGITS = 6  # of coefficients: what is left of a fit on another machine's linear algebra is the same


class Work(NamedTuple):
    """What a batch costs, whichever stage runs it."""

    layer_s: float  # in each layer
    head_s: float  # in the last stage
    stage_s: float  # in every stage

    def on(self, layer_count: int, *, is_last: bool) -> float:
        return self.stage_s + self.layer_s * layer_count + (self.head_s if is_last else 0.0)


class ExecutionModel(Protocol):
    def work(self, batch: Batch) -> Work: ...


class Profiled:
    """Measured on a whole instance; a stage takes its share of the layers."""

    def __init__(self, cost: CostModel, layer_count: int) -> None:
        self._cost = cost
        self._layer_count = layer_count

    def work(self, batch: Batch) -> Work:
        chunks = [Chunk(part.first_position, len(part.token_ids)) for part in batch.slices]
        return Work(self._cost.batch_cost_s(chunks) / self._layer_count, 0.0, 0.0)


class Roofline:
    """One instance: its GPUs compute and read side by side and add up what they have after each half of a layer."""

    def __init__(self, model: ModelSpec, cluster: Cluster, timings: Timings) -> None:
        gpu = cluster.gpu
        gpus, layers = model.gpus_per_instance, model.layer_count
        flops_per_s = gpu.flops_per_s * timings.compute_fraction * gpus
        bytes_per_s = gpu.memory_bytes_per_s * timings.bandwidth_fraction * gpus
        active = (model.active_parameter_count or model.parameter_count) - model.other_parameter_count
        self._token_s = 2 * active / layers / flops_per_s
        self._pair_s = 4 * model.attention_width / flops_per_s
        self._context_s = model.kv_elements_per_token_layer * ELEMENT_BYTES / bytes_per_s
        experts_bytes = model.expert_parameter_count * ELEMENT_BYTES / layers
        self._dense_s = (model.layer_parameter_bytes - experts_bytes) / bytes_per_s
        self._experts_s = experts_bytes / bytes_per_s
        self._idle_share = 1.0 - model.experts_per_token / model.experts_per_layer if model.experts_per_layer else 1.0
        head_count = model.other_parameter_count / 2  # the other half is the embedding, which is looked up
        self._head_s = head_count * ELEMENT_BYTES / bytes_per_s
        self._head_token_s = 2 * head_count / flops_per_s
        self._stage_s = timings.step_overhead_s
        self._sequence_s = timings.sequence_overhead_s
        self._collective_s, self._collective_token_s = 0.0, 0.0
        if gpus > 1:
            link = gpu.scale_up_bytes_per_s if gpus <= cluster.gpus_per_host else gpu.nic_bytes_per_s
            sent_bytes = 2 * (gpus - 1) / gpus * model.hidden_size * ELEMENT_BYTES  # of an all-reduce around a ring
            self._collective_s = 2 * timings.collective_latency_s
            self._collective_token_s = 2 * sent_bytes / (link * timings.collective_fraction)

    def work(self, batch: Batch) -> Work:
        tokens = context = sampled = 0
        attention_s = 0.0
        for _, first, token_ids, samples in batch.slices:
            count = len(token_ids)
            tokens += count
            sampled += samples
            if count == 1:
                context += first + 1
            else:
                attention_s += self._chunk_s(first, count)
        attention_s += context * self._context_s
        weights_s = self._dense_s
        if self._experts_s:
            weights_s += self._experts_s * (1.0 - self._idle_share**tokens)
        layer_s = max(weights_s, tokens * self._token_s) + attention_s
        layer_s += self._collective_s + tokens * self._collective_token_s
        head_s = max(self._head_s, sampled * self._head_token_s) if sampled else 0.0
        return Work(layer_s, head_s, self._stage_s + len(batch.slices) * self._sequence_s)

    def _chunk_s(self, prefix: int, count: int) -> float:
        pairs = prefix * count + (count * count + count) / 2
        return max(pairs * self._pair_s, (prefix + count) * self._context_s)


def fitted(execution: ExecutionModel, layer_count: int) -> CostModel:
    """What a profile of the whole instance would find: the model that workers form microbatches by.

    Balance asks for ratios, so it serves for stages of any size.
    """
    shares = [((prefix, count),) for prefix in _PREFIXES for count in _COUNTS]
    shares += [((prefix, 1),) * count for prefix in _PREFIXES for count in _DECODES]
    shares += [((2048, 512), *((prefix, 1),) * 64) for prefix in _PREFIXES]
    rows = np.array([terms_of([Chunk(*pair) for pair in chunks]) for chunks in shares])
    seconds = [execution.work(_batch(chunks)).on(layer_count, is_last=True) for chunks in shares]
    return cost_of([float(f"{x:.{_DIGITS}g}") for x in relative_fit(rows, np.array(seconds)).tolist()])


def _batch(chunks: tuple[tuple[int, int], ...]) -> Batch:
    slices = [Slice(number, prefix, (0,) * count, True) for number, (prefix, count) in enumerate(chunks)]
    return Batch(0, (), (), tuple(slices))
