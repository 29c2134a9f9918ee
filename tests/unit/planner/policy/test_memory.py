"""The memory figures of plans match what a worker's memory has after executing them."""

import pytest
import torch

from ballast.common.ids import WorkerId
from services.planner.policy.snapshot import InstanceState, ModelShape
from services.planner.policy.split import Splitter
from services.worker.memory.device import DeviceMemory
from services.worker.memory.host import HostBackend
from services.worker.memory.kv_cache import KvShape
from services.worker.memory.parameters import TensorSpec

LAYERS = 7


@pytest.mark.parametrize(("first_layer", "last_layer"), [(0, 3), (3, 5), (5, 7), (0, 7)])
def test_planned_bytes_and_blocks_equal_a_workers(first_layer: int, last_layer: int) -> None:
    budget_bytes = 4 << 20
    with DeviceMemory.open(
        HostBackend(),
        budget_bytes=budget_bytes,
        layers=[{"weight": TensorSpec((100, 700 + 10 * i), torch.float32)} for i in range(LAYERS)],
        others={"embedding": {"weight": TensorSpec((33, 100), torch.float32)}},
        kv_shape=KvShape(layer_count=LAYERS, block_tokens=4, kv_heads=2, head_dim=8, dtype=torch.float32),
        extent_bytes=16 << 10,
    ) as memory:
        model = ModelShape(
            layer_parameter_bytes=tuple(memory.parameters.size_bytes_of(i) for i in range(LAYERS)),
            other_parameter_bytes=memory.parameters.other_bytes,
            block_tokens=4,
            block_bytes=memory.kv.shape.block_bytes,
            extent_bytes=memory.report().extent_bytes,
        )
        instance = InstanceState(WorkerId("w0"), budget_bytes, 0, LAYERS, tuple(range(LAYERS)))
        assert model.block_count(budget_bytes, 0, LAYERS) == memory.kv.block_count

        told = Splitter(model).aftermath(instance, first_layer, last_layer)
        before_bytes = memory.report().parameter_bytes
        memory.drop_layers(told.dropped_layers)
        assert before_bytes - memory.report().parameter_bytes == told.freed_bytes
        assert memory.release_retired() == memory.kv.block_count == told.block_count
        memory.check()
