"""Duration of a batch on a stage.

`SimRoofline` derives the coefficients of `services.worker.policy.roofline` from a data sheet. Equation 1 of KunServe
has a single coefficient for attention in chunks and in decodes. It fits chunks, but makes decodes of long sequences far
too cheap, because reading the KV of one token takes as long as computing 20 token pairs of a prompt on an A800.
"""

from typing import Protocol

import numpy as np

from ballast.common.cost import Chunk, CostModel
from services.worker.core.batch import Batch, Slice
from services.worker.policy.cost_fit import coefficients_of, cost_of, fit_knee, terms_of
from services.worker.policy.roofline import BatchCost, RooflineCosts
from sim.hardware import ELEMENT_BYTES, Cluster, ModelSpec, Timings

_PREFIXES = (0, 512, 2048, 8192)
_COUNTS = (16, 64, 256, 1024, 2048)
_DECODES = (1, 8, 32, 128, 256)
_MANY = 5  # index of the term for matrix products on CPUs
_DIGITS = 6  # digits of coefficients; hides differences between linear algebra libraries


class ExecutionModel(Protocol):
    def work(self, batch: Batch) -> BatchCost: ...


class SimRoofline:
    """One instance: its GPUs compute and read in parallel, with an all-reduce after each half of a layer."""

    def __init__(self, model: ModelSpec, cluster: Cluster, timings: Timings) -> None:
        gpu = cluster.gpu
        gpus, layers = model.gpus_per_instance, model.layer_count
        flops_per_s = gpu.rate_of(model.quantization) * timings.compute_fraction * gpus
        dense_flops_per_s = gpu.flops_per_s * timings.compute_fraction * gpus
        attention_flops_per_s = gpu.flops_per_s * timings.attention_fraction * gpus
        weights_per_s = gpu.memory_bytes_per_s * timings.weights_fraction * gpus
        bytes_per_s = gpu.memory_bytes_per_s * timings.bandwidth_fraction * gpus
        active = (model.active_parameter_count or model.parameter_count) - model.other_parameter_count
        experts_bytes = model.expert_parameter_count * model.parameter_element_bytes / layers
        ends, table = model.other_parameter_count, model.vocab_size * model.hidden_size
        head_count = ends if ends < 1.5 * table else ends / 2  # tied: one table; otherwise half is a mere lookup
        fixed_s = _measured(gpu.layer_floor_s, timings.layer_floor_s)
        row_s = timings.row_passes * model.hidden_size * ELEMENT_BYTES / gpu.memory_bytes_per_s  # read on every GPU
        if gpus > 1:
            link = gpu.scale_up_bytes_per_s if gpus <= cluster.gpus_per_host else gpu.nic_bytes_per_s
            sent_bytes = 2 * (gpus - 1) / gpus * model.hidden_size * ELEMENT_BYTES  # per GPU of a ring all-reduce
            fixed_s += 2 * _measured(gpu.collective_latency_s, timings.collective_latency_s)
            row_s += 2 * sent_bytes / (link * _measured(gpu.collective_fraction, timings.collective_fraction))
        self.costs = RooflineCosts(
            token_s=2 * active / layers / flops_per_s,
            pair_s=4 * model.attention_width / attention_flops_per_s,
            context_s=model.kv_elements_per_token_layer * model.kv_element_bytes / bytes_per_s,
            dense_s=(model.layer_parameter_bytes - experts_bytes) / weights_per_s,
            experts_s=experts_bytes / weights_per_s,
            idle_share=1.0 - model.experts_per_token / model.experts_per_layer if model.experts_per_layer else 1.0,
            head_s=head_count * ELEMENT_BYTES / weights_per_s,
            head_token_s=2 * head_count / dense_flops_per_s,
            stage_s=timings.step_overhead_s,
            sequence_s=timings.sequence_overhead_s,
            fixed_s=fixed_s,
            row_s=row_s,
        )

    def work(self, batch: Batch) -> BatchCost:
        return self.costs.work(batch.slices)


def _measured(figure: float | None, otherwise: float) -> float:
    return otherwise if figure is None else figure


def fitted(execution: ExecutionModel, layer_count: int) -> CostModel:
    """The cost model that profiling an instance with all layers would fit; used for microbatches.

    Balancing needs only ratios, so it also serves for stages.
    """
    shares = [((prefix, count),) for prefix in _PREFIXES for count in _COUNTS]
    shares += [((prefix, 1),) * count for prefix in _PREFIXES for count in _DECODES]
    shares += [((2048, 512), *((prefix, 1),) * 64) for prefix in _PREFIXES]
    rows = np.array([terms_of([Chunk(*pair) for pair in chunks]) for chunks in shares])
    rows[:, _MANY] = 0.0
    seconds = [execution.work(_batch(chunks)).on(layer_count, is_last=True) for chunks in shares]
    found = fit_knee(rows, np.array(seconds))
    rounded = [float(f"{x:.{_DIGITS}g}") for x in coefficients_of(found).tolist()]
    return cost_of(rounded, found.knee_tokens)


def _batch(chunks: tuple[tuple[int, int], ...]) -> Batch:
    slices = [Slice(number, prefix, (0,) * count, True) for number, (prefix, count) in enumerate(chunks)]
    return Batch(0, (), (), tuple(slices))
