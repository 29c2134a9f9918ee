"""Loads a model's parameters from the copy that another worker on this host has made, or makes that copy."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from ballast.service.logs import get_logger
from services.worker.engine.checkpoint import revision_of, tensor_places
from services.worker.engine.implementation import Implementation
from services.worker.memory import shared_copy
from services.worker.memory.device import DeviceMemory
from services.worker.memory.parameters import ParameterStore, layer_name
from services.worker.memory.shared_copy import Copied, SharedCopy, budget_of, open_copy, why_no_room

OFF = "off"


def load(
    served: Implementation, memory: DeviceMemory, compute_here: Callable[[], None], model_dir: Path, setting: str
) -> SharedCopy | None:
    """Fill all parameters. Returns the host copy that was used or made, or None if parameters were read from the
    checkpoint and no copy was made. `setting`: value of --host-copy.

    Raises:
        ConfigError: the checkpoint does not match its config.json, or the setting is invalid.
    """
    store = memory.parameters
    if setting == OFF:
        served.load(memory, compute_here)
        return None
    budget_bytes, root = budget_of(setting), shared_copy.ROOT
    if served.name != "ballast":
        why = f"the code of {served.name} also fills buffers, which are not parameters"
        get_logger().warning("no host copy", why=why)
        served.load(memory, compute_here)
        return None
    size_bytes = store.other_bytes + sum(store.size_bytes_of(layer) for layer in range(store.layer_count))
    try:
        found = open_copy(root, _digest(store, model_dir, served))
    except OSError as error:
        get_logger().warning("no host copy", root=str(root), why=str(error))
        served.load(memory, compute_here)
        return None
    if isinstance(found, SharedCopy):
        if _fill(store, found):
            get_logger().info("parameters are those of the host's copy", size_bytes=found.size_bytes)
            return found
        found.close()
        served.load(memory, compute_here)
        return None
    with found as maker:
        if why := why_no_room(root, size_bytes, budget_bytes):
            get_logger().info("no host copy is made", why=why)
            maker.give_up()
            served.load(memory, compute_here)
            return None
        served.load(memory, compute_here)
        return maker.make(_parts(store))


def _parts(store: ParameterStore) -> list[Copied]:
    layers = [
        Copied(layer_name(layer), store.pieces(layer), store.loaded_checksums[layer])
        for layer in range(store.layer_count)
    ]
    others = [Copied(name, list(store.part(name).values()), store.part_checksum(name)) for name in store.other_names]
    return [*others, *layers]


def _fill(store: ParameterStore, copy: SharedCopy) -> bool:
    for name in store.other_names:
        if not copy.fill(name, list(store.part(name).values())):
            return False
    for layer in range(store.layer_count):
        if not copy.fill(layer_name(layer), store.pieces(layer)):
            return False
        store.loaded_checksums[layer] = bytes.fromhex(copy.parts[layer_name(layer)].checksum)
    return True


def _digest(store: ParameterStore, model_dir: Path, served: Implementation) -> str:
    """Digest of the checkpoint's current files, the memory layout of the parameters and the checksum method."""
    digest = hashlib.sha256(f"{revision_of(model_dir)} {served.config.rank}/{served.config.rank_count}".encode())
    digest.update(store.checksums_by.value.encode())
    for path in sorted(set(tensor_places(model_dir).values())):
        told = path.stat()
        digest.update(f"{path.resolve()} {told.st_size} {told.st_mtime_ns}".encode())
    for layer in range(store.layer_count):
        digest.update(store.layout(layer))
    for name in store.other_names:
        digest.update(store.other_layout(name))
    return digest.hexdigest()[:32]
