"""Checks of a cluster's configuration before any of its processes is started."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from ballast.common.errors import ConfigError
from ballast.common.units import human_bytes
from ballast.rpc.server import ensure_free
from ballast.service.security import is_loopback
from ballast.service.settings import Settings, load_settings
from services.dispatcher.config import DispatcherSettings
from services.gateway.config import GatewaySettings
from services.monitor.config import MonitorSettings
from services.planner.config import PlannerSettings
from services.worker.config import WorkerSettings
from services.worker.engine.model_config import read_model_config
from tools.local.cluster import Service
from tools.model.info import CheckpointInfo

_SETTINGS: Mapping[Service, type[Settings]] = {
    "monitor": MonitorSettings,
    "planner": PlannerSettings,
    "worker": WorkerSettings,
    "dispatcher": DispatcherSettings,
    "gateway": GatewaySettings,
}
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def check_flags(flags: Mapping[Service, Sequence[str]], model: str) -> None:
    """Raise ConfigError for flags that a service would reject."""
    for service, settings in _SETTINGS.items():
        needed = ["--model", model] if "model" in settings.model_fields else []
        load_settings(settings, [*needed, *flags.get(service, ())])


def check_host(args: argparse.Namespace) -> None:
    """Raise ConfigError if other machines can reach `--host`, and neither `--secure` nor `--insecure` is given."""
    if args.secure is None and not args.insecure and not is_loopback(args.host):
        why = f"{args.host} is reached from other machines: --secure DIR makes certificates and a token, and uses them;"
        raise ConfigError("--host", f"{why} --insecure gives full access to anyone who can reach it")


def check_ports(args: argparse.Namespace) -> None:
    """Raise ConfigError if a requested port is in use."""
    wanted = {"--port": (args.port, args.dispatchers), "--http-port": (args.http_port, args.gateways)}
    for flag, (first, count) in {**wanted, "--dashboard-port": (args.dashboard_port, 1)}.items():
        for port in range(first, first + count) if first else ():
            try:
                ensure_free(args.host, port)
            except ConfigError:
                why = f"{args.host}:{port} is in use, perhaps by another cluster; {flag} 0 takes any free ports"
                raise ConfigError(flag, why) from None


def check_memory(args: argparse.Namespace, info: CheckpointInfo) -> None:
    """Raise ConfigError if the parameters alone exceed the device memory of a worker's ranks."""
    if args.device_memory_bytes is None:
        return
    ranks = int(args.tensor_parallel_size or 1)
    width = _DTYPE_BYTES.get(args.dtype or "")
    needed = info.parameter_bytes
    if width is not None and not info.is_quantised:
        needed = info.parameter_count * width
    if needed > args.device_memory_bytes * ranks:
        given = human_bytes(args.device_memory_bytes)
        why = f"{given} are too little: the model's parameters alone take {human_bytes(needed // ranks)} a rank"
        raise ConfigError("--device-memory-bytes", why)


def adapters_of(given: Sequence[str]) -> dict[str, Path]:
    """Parse `--lora-modules` to name -> folder. Raises ConfigError for an entry that is not NAME=FOLDER, or a name that
    occurs twice.
    """
    found: dict[str, Path] = {}
    for one in given:
        name, equals, folder = one.partition("=")
        if not (name and equals and folder):
            raise ConfigError("--lora-modules", f"must be NAME=FOLDER, got {one!r}")
        if name in found:
            raise ConfigError("--lora-modules", f"names {name!r} twice")
        found[name] = Path(folder)
    return found


def check_adapters(modules: Mapping[str, Path], model_dir: Path, model_impl: str) -> None:
    """Raise ConfigError for an adapter that workers would reject. For models that transformers computes, only the
    adapter's files are checked, not whether it fits the model.
    """
    if not modules:
        return
    from services.worker.engine.lora_files import own_linears, read_adapters  # imports safetensors

    try:
        linears = None if model_impl == "transformers" else own_linears(read_model_config(model_dir))
    except ConfigError:
        linears = None
    read_adapters(modules, linears)
