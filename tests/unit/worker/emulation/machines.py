"""A small emulated machine on which computation takes no time."""

from ballast.common.cost import CostModel
from services.worker.emulation.engine import EmulatedEngine, emulate
from services.worker.emulation.machine import Machine, MeasuredCosts, Outline

FREE = CostModel(0.0, 0.0, 0.0, 0.0)
BLOCK_TOKENS = 4
VOCABULARY = 1000


def small_machine(**changes: object) -> Machine:
    machine = Machine(
        name="small",
        model=Outline(
            name="outline",
            architecture="LlamaForCausalLM",
            parameter_count=4 << 20,
            layer_count=4,
            layer_parameter_bytes=2 << 20,
            other_parameter_bytes=1 << 20,
            kv_elements_per_token_layer=512,
            hidden_size=256,
            vocab_size=VOCABULARY,
            max_model_len=4096,
        ),
        memory_bytes=32 << 20,
        execution=MeasuredCosts(layer=FREE, step=FREE, first=FREE, last=FREE),
        link_bytes_per_s=1e12,
        disk_bytes_per_s=1e12,
        remap_s_per_byte=0.0,
    )
    return machine.model_copy(update=changes)


def small_engine(**changes: object) -> EmulatedEngine:
    return emulate(small_machine(**changes), block_tokens=BLOCK_TOKENS)
