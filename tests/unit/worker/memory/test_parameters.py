from collections.abc import Iterator

import pytest
import torch

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.memory.device import DeviceMemory
from services.worker.memory.host import HostBackend
from services.worker.memory.parameters import ALIGNMENT_BYTES, TensorSpec, lay_out
from tests.unit.worker.memory.models import EXTENTS_PER_LAYER, LAYERS, OTHERS, fill_layer, open_small


@pytest.fixture
def memory() -> Iterator[DeviceMemory]:
    with open_small(HostBackend()) as made:
        yield made


def test_tensors_are_consecutive_at_aligned_offsets() -> None:
    layout = lay_out(
        "layers.0",
        {
            "a": TensorSpec((3,), torch.bfloat16),
            "b": TensorSpec((5, 7), torch.float64),
            "c": TensorSpec((1,), torch.float16),
        },
    )
    assert [(p.offset_bytes, p.size_bytes) for p in layout.placements] == [(0, 6), (64, 280), (384, 2)]
    assert layout.size_bytes == 386


@pytest.mark.parametrize(
    ("spec", "why"),
    [(TensorSpec((2, 0), torch.float32), "not positive"), (TensorSpec((2,), torch.complex64), "not supported")],
)
def test_a_tensor_that_cannot_be_held_is_named(spec: TensorSpec, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"layers\.3\.up: .*{why}"):
        lay_out("layers.3", {"up": spec})


def test_every_tensor_has_the_requested_shape_and_dtype_and_its_own_memory(memory: DeviceMemory) -> None:
    for name, specs in OTHERS.items():
        tensors = memory.parameters.part(name)
        assert {key: TensorSpec(tuple(t.shape), t.dtype) for key, t in tensors.items()} == dict(specs)
    every = [t for i in range(LAYERS) for t in memory.parameters.layer(i).values()]
    every += [t for name in OTHERS for t in memory.parameters.part(name).values()]
    for value, tensor in enumerate(every):
        tensor.fill_(value)
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
    assert [tensor.unique().tolist() for tensor in every] == [[value] for value in range(len(every))]


def test_parameters_are_zero_before_they_are_loaded(memory: DeviceMemory) -> None:
    assert all(not tensor.any() for tensor in memory.parameters.layer(2).values())


def test_a_checksum_changes_with_any_bit_and_only_then(memory: DeviceMemory) -> None:
    fill_layer(memory, 0)
    before, untouched = memory.parameters.layer_checksum(0), memory.parameters.layer_checksum(1)
    weight = memory.parameters.layer(0)["down"]
    old = weight[-1, -1].item()
    weight[-1, -1] = torch.nextafter(weight[-1, -1], torch.tensor(9.0))
    assert memory.parameters.layer_checksum(0) != before
    weight[-1, -1] = old
    assert memory.parameters.layer_checksum(0) == before
    assert memory.parameters.layer_checksum(1) == untouched


def test_a_checksum_depends_on_the_contents_and_not_on_the_place(memory: DeviceMemory) -> None:
    assert memory.parameters.layer_checksum(0) == memory.parameters.layer_checksum(1)
    assert memory.parameters.part_checksum("embedding") != memory.parameters.part_checksum("head")


def test_dropped_layers_become_kv_and_are_restored_unchanged(memory: DeviceMemory) -> None:
    for layer in range(LAYERS):
        fill_layer(memory, layer)
    sums = [memory.parameters.layer_checksum(layer) for layer in range(LAYERS)]
    weight = memory.parameters.layer(3)["up"]
    address, kv, blocks = weight.data_ptr(), memory.kv.layer(0), memory.kv.block_count
    kv[:blocks].fill_(0.5)

    assert memory.parameters.drop([2, 3]) == 2 * EXTENTS_PER_LAYER
    memory.check()
    grown = memory.kv.window.grow(2)
    memory.check()
    kv[blocks:grown].fill_(8.0)  # a view made before the change reaches the blocks mapped by it
    assert memory.kv.layer(0) is kv
    assert kv[blocks - 1 : blocks + 1].amax(dim=(1, 2, 3, 4)).tolist() == [0.5, 8.0]

    memory.kv.window.shrink(2, used_blocks_end=blocks)
    for layer in (3, 2):
        memory.parameters.restore(layer)
        memory.check()
    assert memory.parameters.layer_checksum(3) != sums[3]
    for layer in (2, 3):
        fill_layer(memory, layer)
    assert [memory.parameters.layer_checksum(layer) for layer in range(LAYERS)] == sums
    assert memory.parameters.layer(3)["up"] is weight
    assert weight.data_ptr() == address
    assert kv[:blocks].unique().tolist() == [0.5]


def test_old_contents_of_an_extent_do_not_affect_the_checksum(memory: DeviceMemory) -> None:
    """Checksums leave out the padding between tensors."""
    fill_layer(memory, 1)
    before = memory.parameters.layer_checksum(1)
    memory.parameters.drop([1])
    memory.kv.window.grow(1)
    for layer in range(LAYERS):
        memory.kv.layer(layer)[: memory.kv.block_count].fill_(-1.0)
    memory.kv.window.shrink(1, used_blocks_end=0)
    memory.parameters.restore(1)
    fill_layer(memory, 1)
    assert memory.parameters.layer_checksum(1) == before


def test_access_to_a_dropped_layer_is_refused(memory: DeviceMemory) -> None:
    memory.parameters.drop([1])
    assert memory.parameters.held_layers == (0, 2, 3)
    for ask in (
        lambda: memory.parameters.layer(1),
        lambda: memory.parameters.layer_checksum(1),
        lambda: memory.parameters.drop([0, 1]),
        lambda: memory.parameters.restore(0),
    ):
        with pytest.raises(InvariantViolation, match=r"held are \(0, 2, 3\)"):
            ask()
    memory.check()


def test_a_layer_named_twice_is_dropped_once(memory: DeviceMemory) -> None:
    assert memory.parameters.drop([1, 1]) == EXTENTS_PER_LAYER
    memory.check()


def test_a_restore_without_room_is_refused_and_changes_nothing(memory: DeviceMemory) -> None:
    memory.parameters.drop([0])
    memory.kv.window.grow(1)
    with pytest.raises(InvariantViolation, match="4 extents requested for PARAMETERS, but 1 are free"):
        memory.parameters.restore(0)
    memory.check()
    assert memory.parameters.held_layers == (1, 2, 3)
