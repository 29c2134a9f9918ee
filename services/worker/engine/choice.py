"""Chooses the implementation of a model from its config.json, before any tensor is read."""

from pathlib import Path

import torch

from ballast.common.errors import ConfigError
from ballast.service.logs import get_logger
from services.worker.engine.implementation import BallastModel, Implementation
from services.worker.engine.kv_dtype import FP8, kv_dtype
from services.worker.engine.model_config import ModelConfig, ModelFacts, read_json, read_model_config
from services.worker.engine.native.library import KERNELS, Kernels, choose_kernels
from services.worker.engine.peers import Peers
from services.worker.memory.gpus import gpu_index

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ATTENTION_BACKENDS = ("auto", "triton", "flashinfer")
MODEL_IMPLS = ("auto", "ballast", "transformers")


def choose_model(
    model_dir: Path,
    *,
    model_impl: str,
    dtype: str,
    device: str,
    kernels: str,
    max_model_len: int | None = None,
    peers: Peers | None = None,
    attention_backend: str = "auto",
    adapted: bool = False,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
) -> tuple[Implementation, Kernels | None]:
    """Choose the implementation, and the compiled kernels if it uses them.

    `adapted`: the model has LoRA adapters, so torch is used: adapters modify the products inside each layer, and the
    compiled kernels compute a layer in a single call.

    `batch_invariant`: a row's result must not depend on the other rows of a step. On a CPU this always holds.

    Raises:
        ConfigError: no implementation can serve the model with these settings.
    """
    for name, value, known in (
        ("model_impl", model_impl, MODEL_IMPLS),
        ("attention_backend", attention_backend, ATTENTION_BACKENDS),
        ("kernels", kernels, KERNELS),
    ):
        if value not in known:
            raise ConfigError(name, f"{value!r} is not supported; use one of {', '.join(known)}")
    if attention_backend != "auto" and gpu_index(device) is None:
        raise ConfigError("attention_backend", f"{attention_backend} computes on GPUs, with device {device} use auto")
    batch_invariant = batch_invariant and gpu_index(device) is not None
    if attention_backend == "flashinfer" and kv_dtype(kv_cache_dtype, torch.bfloat16) == FP8:
        raise ConfigError("kv_cache_dtype", "FlashInfer has not been tried with it: use --attention-backend auto")
    if batch_invariant:
        _require_invariant(attention_backend, peers, adapted=adapted)
    ours = own_config(model_dir, "ballast" if batch_invariant else model_impl, max_model_len)
    if adapted and ours is not None:
        if kernels == "native":
            raise ConfigError("kernels", "native kernels compute no LoRA adapters: use auto or torch")
        kernels = "torch"
    if ours is None:
        if adapted and peers is not None and peers.count > 1:
            why = "transformers computes this model, and its adapters are not divided among ranks"
            raise ConfigError("lora_modules", f"{why}: use --tensor-parallel-size 1")
        return _of_transformers(model_dir, dtype, device, kernels, peers, kv_cache_dtype)
    config = ours if peers is None else ours.of_rank(peers.rank, peers.count)
    run_dtype = choose_dtype(dtype, config, model_dir)
    native = choose_kernels(kernels, device, config, run_dtype)
    model = BallastModel(
        model_dir=model_dir,
        config=config,
        dtype=run_dtype,
        kv_dtype=kv_dtype(kv_cache_dtype, run_dtype),
        device=device,
        kernels=native,
        peers=peers,
        attention_backend=attention_backend,
        whole=ours,
        batch_invariant=batch_invariant,
    )
    return model, native


def _require_invariant(attention_backend: str, peers: Peers | None, *, adapted: bool) -> None:
    """Raise ConfigError if anything other than the matrix products makes results depend on the batch."""
    if attention_backend == "flashinfer":
        raise ConfigError(
            "batch_invariant", "FlashInfer's splits depend on the whole batch: use --attention-backend auto"
        )
    if peers is not None and peers.count > 1:
        raise ConfigError("batch_invariant", "sums over ranks depend on the batch: use --tensor-parallel-size 1")
    if adapted:
        raise ConfigError("batch_invariant", "products of LoRA adapters depend on the batch: serve no adapters")


def own_config(model_dir: Path, model_impl: str, max_model_len: int | None = None) -> ModelConfig | None:
    """Configuration for our own classes; None if `transformers` has to compute the model. With "auto", our own classes
    are used if they support the model and `max_model_len`.

    Raises:
        ConfigError: our own classes were requested and do not support the model, or the folder is not a checkpoint.
    """
    if model_impl == "transformers":
        return None
    read_json(model_dir / "config.json")
    try:
        config = read_model_config(model_dir)
    except ConfigError as error:
        if model_impl == "ballast":
            raise
        get_logger().info("not one of Ballast's own models, transformers computes it", why=str(error))
        return None
    if model_impl == "auto" and max_model_len is not None and max_model_len > config.max_position:
        return None  # longer than the attention window, which our classes do not implement
    return config


def _of_transformers(
    model_dir: Path, dtype: str, device: str, kernels: str, peers: Peers | None, kv_cache_dtype: str
) -> tuple[Implementation, Kernels | None]:
    from services.worker.engine.division import WHOLE, Division
    from services.worker.engine.transformers_model import TransformersModel, read_transformers_config

    facts, config = read_transformers_config(model_dir)
    run_dtype = choose_dtype(dtype, facts, model_dir)
    native = choose_kernels(kernels, device, None, run_dtype)
    division = WHOLE if peers is None else Division(peers.rank, peers.count, peers.sum)
    stored = kv_dtype(kv_cache_dtype, run_dtype)
    return TransformersModel(model_dir, facts, config, run_dtype, stored, torch.device(device), division), native


def choose_dtype(name: str, config: ModelFacts, model_dir: Path) -> torch.dtype:
    """The dtype to compute in. Raises ConfigError if it is not supported."""
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError("dtype", f"{name!r} is not supported; use auto or one of {', '.join(DTYPES)}")
        return DTYPES[name]
    stored = config.checkpoint_dtype or "float32"
    if stored not in DTYPES:
        raise ConfigError(
            f"{model_dir / 'config.json'}: dtype",
            f"{stored!r} cannot be run as it is; choose one of {', '.join(DTYPES)}",
        )
    return DTYPES[stored]
