"""The longest context that instances of a model can hold alone and together, from the catalogue."""

from dataclasses import dataclass

from ballast.common.errors import ConfigError
from ballast.common.load import MemoryReport
from services.planner.policy.reach import reach_of
from services.planner.policy.snapshot import ModelShape
from sim.hardware import Gpu, ModelSpec, timings
from sim.memory import Geometry

COUNTS = (1, 2, 3, 4, 8)  # instances per group
_BLOCK_TOKENS = 64  # block size on GPU workers
# (model, GPU, GPUs per instance): with few exceptions, one instance holds less context than the model permits.
PAIRS = (
    ("Llama-3.1-8B", "L4", 1),
    ("Llama-3.1-8B", "L40S", 1),
    ("Qwen2.5-14B", "A100-40G", 1),
    ("Qwen3-32B", "H100-80G", 1),
    ("Llama-3.1-70B", "H100-80G", 2),
)


@dataclass(frozen=True, slots=True)
class LongestContext:
    model: str
    gpus: str  # GPUs per instance
    tokens: dict[int, int | None]  # instances per group -> tokens; None: the parameters do not fit
    max_model_len: int


def context_of(model: ModelSpec, gpu: Gpu, gpu_count: int = 0) -> LongestContext:
    """The longest contexts of a model on a GPU. `gpu_count`: GPUs per instance; 0: the catalogue's number."""
    count = gpu_count or model.gpus_per_instance
    budget_bytes = int(gpu.memory_bytes * timings().memory_fraction) * count
    block_bytes = model.kv_elements_per_token_layer * model.kv_element_bytes * _BLOCK_TOKENS
    tokens: dict[int, int | None] = dict.fromkeys(COUNTS)
    try:
        geometry = Geometry.choose(
            budget_bytes=budget_bytes,
            layer_count=model.layer_count,
            layer_parameter_bytes=model.layer_parameter_bytes,
            other_parameter_bytes=model.other_parameter_bytes,
            block_bytes=block_bytes,
        )
    except ConfigError:
        return LongestContext(model.name, f"{count} x {gpu.name}", tokens, model.max_model_len)
    shape = ModelShape(
        layer_parameter_bytes=(model.layer_parameter_bytes,) * model.layer_count,
        other_parameter_bytes=model.other_parameter_bytes,
        block_tokens=_BLOCK_TOKENS,
        block_bytes=block_bytes,
        extent_bytes=geometry.extent_bytes,
    )
    memory = MemoryReport(budget_bytes=budget_bytes, parameter_bytes=0, kv_bytes=0, free_bytes=budget_bytes)
    for instances in COUNTS:
        tokens[instances] = reach_of(shape, [memory] * instances, 1 << 40).group_tokens
    return LongestContext(model.name, f"{count} x {gpu.name}", tokens, model.max_model_len)


def table(contexts: list[LongestContext]) -> list[str]:
    """Table in Markdown."""
    counts = " | ".join(map(str, COUNTS))
    lines = [f"| model, instance | {counts} | the model's own |", f"|---|{'---|' * len(COUNTS)}---|"]
    for one in contexts:
        cells = " | ".join("-" if tokens is None else f"{tokens // 1000:,}k" for tokens in one.tokens.values())
        lines.append(f"| {one.model}, {one.gpus} | {cells} | {one.max_model_len // 1024}k |")
    return lines
