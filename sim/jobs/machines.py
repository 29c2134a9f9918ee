"""Machines of emulated workers, from the catalogue or from a profile of this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ballast.common.errors import ConfigError
from ballast.service.logs import silence
from services.worker.core.batch import Slice
from services.worker.cost_profile import read_profile
from services.worker.emulation.engine import emulate
from services.worker.emulation.machine import Machine, MeasuredCosts, Outline, Roofline, read_machine, write_machine
from services.worker.emulation.tokens import answer
from services.worker.policy.step_limits import step_limits
from sim.cost import SimRoofline as RooflineOf
from sim.cost import fitted
from sim.hardware import Cluster, Gpu, KvCacheDtype, ModelSpec, find_gpu, find_model, is_gpu_file, timings
from tools.bench.emulation import Emulation
from tools.model.info import CheckpointInfo, read_info
from tools.model.safetensors_file import DTYPES
from tools.model.tokenizer import write_tokenizer

_GPU_BLOCK_TOKENS = 64
_STAND_IN_VOCABULARY = 4096  # vocabulary size of a generated tokenizer
_DEFAULT_MEMORY_BYTES = 1 << 30  # default memory of a worker
MACHINE_FILE = "machine.json"
_CHECKPOINT_DTYPES = ("float64", "float32", "bfloat16", "float16")


def catalogue_machine(
    gpu: str, model: str, vocab_size: int | None = None, kv_cache_dtype: KvCacheDtype = "auto"
) -> Machine:
    """One instance of the model on the number of GPUs it needs. `vocab_size`: of the tokenizer, if it is not the
    model's own.

    Raises:
        ConfigError: unknown GPU or model; the message lists the catalogue's entries.
    """
    spec = find_model(model).model_copy(update={"kv_cache_dtype": kv_cache_dtype})
    return machine_of(find_gpu(gpu, "--profile"), spec, vocab_size)


def machine_of(card: Gpu, spec: ModelSpec, vocab_size: int | None = None) -> Machine:
    """One instance of the model on the number of GPUs in the model's entry."""
    figures = timings()
    cluster = Cluster(gpu=card, gpu_count=1, gpus_per_host=card.gpus_per_host)
    roofline, gpus = RooflineOf(spec, cluster, figures), spec.gpus_per_instance
    return Machine(
        name=f"{gpus} x {card.name}",
        model=Outline(
            name=spec.name,
            architecture=spec.architecture,
            parameter_count=spec.parameter_count,
            layer_count=spec.layer_count,
            layer_parameter_bytes=spec.layer_parameter_bytes,
            other_parameter_bytes=spec.other_parameter_bytes,
            kv_elements_per_token_layer=spec.kv_elements_per_token_layer,
            hidden_size=spec.hidden_size,
            vocab_size=vocab_size or spec.vocab_size,
            max_model_len=spec.max_model_len,
        ),
        memory_bytes=int(card.memory_bytes * figures.memory_fraction) * gpus,
        gpu_memory_bytes=int(card.memory_bytes),
        execution=Roofline(costs=roofline.costs, balance=fitted(roofline, spec.layer_count)),
        link_bytes_per_s=card.nic_bytes_per_s * figures.link_fraction * gpus,
        host_bytes_per_s=card.host_bytes_per_s * gpus,
        disk_bytes_per_s=figures.disk_bytes_per_s,
        remap_s_per_byte=figures.remap_s / (spec.parameter_bytes / 2),  # bytes that a drop of half the layers moves
    )


def profiled_machine(path: Path, checkpoint: CheckpointInfo, memory_bytes: int) -> Machine:
    """The machine on which `ballast profile` has measured that checkpoint.

    Raises:
        ConfigError: the file is not a profile of this model, or lacks figures needed by an emulation.
    """
    profile = read_profile(path)
    if profile.key.parameter_count != checkpoint.parameter_count or profile.key.layer_count != checkpoint.layer_count:
        raise ConfigError(str(path), f"is a profile of {profile.model}, not of {checkpoint.path.name}")
    if profile.link is None or profile.key.dtype not in _CHECKPOINT_DTYPES:
        raise ConfigError(str(path), "has no figures of a link, which an emulation needs; make another one")
    element_bytes = DTYPES[profile.key.dtype][1]
    ends = checkpoint.vocab_size * checkpoint.hidden_size * (1 if checkpoint.tied else 2) + checkpoint.hidden_size
    layers = (checkpoint.parameter_count - ends) // checkpoint.layer_count
    costs = profile.costs.stages()
    return Machine(
        name=profile.key.device,
        model=Outline(
            name=checkpoint.path.name,
            architecture=checkpoint.architecture,
            parameter_count=checkpoint.parameter_count,
            layer_count=checkpoint.layer_count,
            layer_parameter_bytes=layers * element_bytes,
            other_parameter_bytes=ends * element_bytes,
            kv_elements_per_token_layer=2 * checkpoint.kv_head_count * checkpoint.head_dim,
            hidden_size=checkpoint.hidden_size,
            vocab_size=checkpoint.vocab_size,
            max_model_len=checkpoint.max_model_len,
            dtype=profile.key.dtype,
        ),
        memory_bytes=memory_bytes,
        execution=MeasuredCosts(layer=costs.layer, step=costs.step, first=costs.first, last=costs.last),
        link_bytes_per_s=profile.link.bandwidth_bytes_per_s,
        host_bytes_per_s=profile.copies.to_device_bytes_per_s,
        disk_bytes_per_s=profile.copies.to_device_bytes_per_s,
        remap_s_per_byte=(profile.remap_s_per_gb or 0.0) / 1e9,
    )


@dataclass(frozen=True, slots=True)
class EmulatedModel:
    model: Path  # folder for dispatchers and workers with at least a tokenizer
    machine: Machine
    machine_file: Path

    @property
    def worker_flags(self) -> list[str]:
        """Flags with the defaults of GPU workers, as in simulations; later flags override them."""
        flags = ["--engine", "emulated", "--profile", str(self.machine_file)]
        if self.machine.execution.kind == "measured":
            return flags
        limits = step_limits(self.machine.gpu_memory_bytes)
        flags += ["--max-num-seqs", str(limits.sequences), "--max-num-batched-tokens", str(limits.tokens)]
        return ["--block-size", str(_GPU_BLOCK_TOKENS), *flags]


def emulated_model(
    folder: Path,
    profile: str,
    model: Path,
    memory_bytes: int | None = None,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> EmulatedModel:
    """Resolve `profile` and `model`. Missing files (machine, tokenizer) are created in `folder`.

    `profile` is a GPU of the catalogue, or a file with a GPU (YAML), a machine, or the output of `ballast profile`.
    `kv_cache_dtype`: the workers' flag, which affects a GPU's speed; other files contain the speed itself.

    Raises:
        ConfigError: they are unknown or inconsistent.
    """
    path = Path(profile)
    if is_gpu_file(profile) or not path.is_file():
        return stand_in(folder, catalogue_machine(profile, str(model), _STAND_IN_VOCABULARY, kv_cache_dtype))
    if '"ballast-emulated-machine"' in path.read_text(encoding="utf-8", errors="replace"):
        return stand_in(folder, read_machine(path))
    machine = profiled_machine(path, read_info(model), memory_bytes or _DEFAULT_MEMORY_BYTES)
    return EmulatedModel(model, machine, write_machine(folder / MACHINE_FILE, machine))


def stand_in(folder: Path, machine: Machine) -> EmulatedModel:
    """Create the files that services need from a checkpoint: a tokenizer and the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, machine.model.vocab_size, qwen=False, max_len=machine.model.max_model_len)
    return EmulatedModel(folder, machine, write_machine(folder / MACHINE_FILE, machine))


def emulation_of(folder: Path, machine: Machine) -> Emulation:
    """Emulation for a comparison; creates its files in `folder`."""
    outline = machine.model.model_copy(update={"vocab_size": _STAND_IN_VOCABULARY})
    made = stand_in(folder, machine.model_copy(update={"model": outline}))
    with silence():
        engine = emulate(made.machine, block_tokens=_GPU_BLOCK_TOKENS)
        capacity_tokens = engine.block_count * _GPU_BLOCK_TOKENS
        engine.close()

    def whole_s(parts: Sequence[Slice]) -> float:
        return machine.execution.stage_s(parts, outline.layer_count, is_first=True, is_last=True)

    return Emulation(
        info=_info(made.model, outline),
        gpu=machine.name,
        worker_flags=made.worker_flags,
        memory_bytes=machine.memory_bytes,
        capacity_tokens=capacity_tokens,
        prompt_s=lambda count: whole_s([Slice(0, 0, (0,) * count, True)]),
        step_s=lambda count, tokens: whole_s([Slice(i, tokens, (0,), True) for i in range(count)]),
        last_token=lambda prompt, count: answer(prompt, count, outline.vocab_size)[-1],
    )


def _info(folder: Path, outline: Outline) -> CheckpointInfo:
    layers_bytes = outline.layer_count * outline.layer_parameter_bytes
    return CheckpointInfo(
        path=folder,
        architecture=outline.architecture,
        dtype=outline.dtype,
        layer_count=outline.layer_count,
        hidden_size=outline.hidden_size,
        head_count=1,
        kv_head_count=1,
        head_dim=outline.kv_elements_per_token_layer // 2,
        vocab_size=outline.vocab_size,
        max_model_len=outline.max_model_len,
        tied=False,
        parameter_count=outline.parameter_count,
        bytes_per_dtype={outline.dtype: layers_bytes + outline.other_parameter_bytes},
        shard_count=0,
        has_tokenizer=True,
        has_chat_template=False,
    )
