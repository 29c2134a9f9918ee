"""Resolves the model name in a worker's settings to a folder."""

import functools
from collections.abc import Callable
from pathlib import Path

from ballast.service.models import find_model, hub_name
from services.worker.config import WorkerSettings
from services.worker.engine.model_config import read_model_config


def with_model(settings: WorkerSettings) -> WorkerSettings:
    """Replace a hub's model name by its snapshot's folder, downloaded if necessary."""
    name = hub_name(str(settings.model))
    if name is None:
        return settings
    found = find_model(settings.model, weights=settings.engine == "torch", check=_check_of(settings))
    named = {"model": found.folder, "served_model_name": settings.served_model_name or found.name}
    return settings.model_copy(update=named)


def _check_of(settings: WorkerSettings) -> Callable[[Path], object]:
    if settings.engine != "torch":
        return read_model_config
    from services.worker.engine.choice import choose_model

    return functools.partial(
        choose_model,
        model_impl=settings.model_impl,
        dtype=settings.dtype,
        device=settings.device.partition(":")[0],
        kernels=settings.kernels,
        max_model_len=settings.max_model_len,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
