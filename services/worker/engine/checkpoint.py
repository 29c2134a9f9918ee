"""Reads the weights of a Hugging Face checkpoint folder, tensor by tensor, into existing memory."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open

from ballast.common.errors import ConfigError
from services.worker.engine.model_config import ModelConfig, read_json
from services.worker.engine.native.library import Kernels
from services.worker.engine.parameters import Parameter, ParameterLayout, Source, end_parameters, layer_parameters
from services.worker.engine.pinned_readers import PinnedReaders
from services.worker.memory.parameters import ParameterStore

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")
_BAND_ELEMENTS = 4 << 20
_SAMPLES, _SAMPLE_BYTES = 32, 4096  # samples of each file that the checkpoint's revision is computed from
_SAYS_NOTHING = ("transformers_version", "torch_dtype", "dtype")  # not in the revision: set elsewhere, or no effect
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")


class Checkpoint:
    """An open checkpoint. Files are memory-mapped; a tensor is read when it is copied to its destination."""

    def __init__(self, model_dir: Path, kernels: Kernels | None = None) -> None:
        """`kernels` are required for packed parameters."""
        self._kernels = kernels
        self._files: dict[Path, Any] = {}  # Any: safetensors has no types for its handle
        self._places = tensor_places(model_dir)  # tensor -> file
        self._model_dir = model_dir
        self._readers: PinnedReaders | None = None  # created when parameters on a GPU are first filled

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._readers is not None:
            self._readers.close()
        self._files.clear()

    def fill(self, parameters: Iterable[Parameter], stored: Mapping[str, torch.Tensor]) -> None:
        """Copy the checkpoint's tensors to each parameter's memory, converting to its dtype.

        Raises:
            ConfigError: a tensor is missing, has a wrong shape or a non-float dtype, or cannot be read.
        """
        coming: list[Future[None]] = []
        for parameter in parameters:
            memory = stored[parameter.name]
            if memory.device.type == "cuda" and self._readers is None:
                self._readers = PinnedReaders(memory.device)
            if not parameter.sources:
                memory.zero_()
            parameter.clear_padding(memory)
            for source in parameter.sources:
                for first_row, rows in self._bands(source, parameter):
                    write = partial(parameter.write, memory, first_row, kernels=self._kernels)
                    if self._readers is None:
                        write(rows)
                    else:
                        coming.append(self._readers.submit(rows, write))
        for band in coming:
            band.result()

    def require_only(self, config: ModelConfig) -> None:
        """Raise ConfigError if the checkpoint has a tensor that the architecture does not use.

        Ignoring a tensor (a bias, an adapter) would mean wrong tokens.
        """
        expected = {source.tensor for part in _all_parameters(replace(config, rank=0)) for source in part.sources}
        if config.tied_embeddings:
            expected.add("lm_head.weight")  # some exports store the tied matrix twice
        for name in sorted(self._places):
            if name not in expected and not name.endswith(IGNORED_SUFFIXES):
                raise ConfigError(
                    f"{self._places[name]}: {name}", f"is not a tensor of {config.architecture} as config.json has it"
                )

    def _bands(self, source: Source, parameter: Parameter) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, rows) of a parameter from `source`, in bands, so that converting takes little memory."""
        path = self._places.get(source.tensor)
        if path is None:
            raise ConfigError(f"{self._model_dir}: {source.tensor}", "the checkpoint has no such tensor")
        where = f"{path}: {source.tensor}"
        try:
            tensor = self._open(path).get_slice(source.tensor)
            shape, dtype = tuple(tensor.get_shape()), str(tensor.get_dtype())
            rows, columns = source.row_share, source.column_share
            mine = (source.row_count, *parameter.shape[1:])
            wanted = (mine[0] * rows.count, *(width * columns.count for width in mine[1:]))
            if shape != wanted:
                raise ConfigError(where, f"has shape {list(shape)}, config.json asks for {list(wanted)}")
            if dtype not in FLOAT_DTYPES:
                supported = ", ".join(FLOAT_DTYPES)
                raise ConfigError(where, f"has dtype {dtype}, supported are {supported}")
            band = max(1, _BAND_ELEMENTS // math.prod(mine[1:]))
            begin = rows.index * mine[0]
            inside = tuple(slice(columns.index * width, (columns.index + 1) * width) for width in mine[1:])
            for first in range(0, source.row_count, band):
                end = min(first + band, source.row_count)
                read = cast(torch.Tensor, tensor[(slice(begin + first, begin + end), *inside)])
                yield source.first_row + first, read
        except (SafetensorError, OSError) as error:
            raise ConfigError(where, f"cannot be read: {error}") from error

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = _open_file(path)
        return self._files[path]


def load_parameters(
    model_dir: Path,
    config: ModelConfig,
    store: ParameterStore,
    layout: ParameterLayout,
    kernels: Kernels | None = None,
    compute_here: Callable[[], None] | None = None,
) -> None:
    """Fill every parameter of the store from the checkpoint. Parameters in panels need the `kernels`.

    A layer's checksum is computed while the next layer is read, so that no drop has to wait for it. The thread that
    computes the checksums calls `compute_here` first. Errors as in `Checkpoint.fill`.
    """
    with Checkpoint(model_dir, kernels) as checkpoint:
        checkpoint.require_only(config)
        for part, parameters in end_parameters(config, layout).items():
            checkpoint.fill(parameters, store.part(part))
        fill_layers(
            store,
            lambda layer: checkpoint.fill(layer_parameters(config, layer, layout), store.layer(layer)),
            compute_here,
        )


def fill_layers(
    store: ParameterStore, fill: Callable[[int], None], compute_here: Callable[[], None] | None = None
) -> None:
    """Fill all layers in order and record their checksums, each computed while the next layer is read."""
    with ThreadPoolExecutor(1, thread_name_prefix="checksums", initializer=compute_here) as thread:
        checksums: list[Future[bytes]] = []
        for layer in range(store.layer_count):
            fill(layer)
            checksums.append(thread.submit(store.layer_checksum, layer))
        store.loaded_checksums.update((layer, checksum.result()) for layer, checksum in enumerate(checksums))


def revision_of(model_dir: Path) -> str:
    """Digest of the configuration and of samples of the weights. Training changes nearly all weights, so samples
    suffice; checkpoints that differ in a few numbers may have the same revision.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    said = {k: v for k, v in read_json(model_dir / "config.json").items() if k[:1] != "_" and k not in _SAYS_NOTHING}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for path in sorted(set(tensor_places(model_dir).values())):
        try:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for sample in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:16]


def _all_parameters(config: ModelConfig) -> list[Parameter]:
    parts = [*end_parameters(config).values(), *(layer_parameters(config, i) for i in range(config.layer_count))]
    return [parameter for part in parts for parameter in part]


def tensor_places(model_dir: Path) -> dict[str, Path]:
    """The file of each tensor, by the tensor's name. Raises ConfigError if files or tensors are missing."""
    single, index = model_dir / _SINGLE, model_dir / _INDEX
    if index.exists():
        return _places_by_index(model_dir, index)
    if single.exists():
        return dict.fromkeys(_open_file(single).keys(), single)
    raise ConfigError(str(model_dir), f"holds neither {_SINGLE} nor {_INDEX}")


def _places_by_index(model_dir: Path, index: Path) -> dict[str, Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: weight_map", "must be an object of tensor and file names")
    places: dict[str, Path] = {}
    for name, file in cast(dict[str, object], weight_map).items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{index}: weight_map.{name}", f"must name a file in the index's folder, got {file!r}")
        places[name] = model_dir / file
    for path in sorted(set(places.values())):
        if not path.exists():
            raise ConfigError(str(path), f"this shard is missing, {index.name} names it")
        held = set(_open_file(path).keys())
        absent = sorted(name for name, place in places.items() if place == path and name not in held)
        if absent:
            raise ConfigError(f"{path}: {absent[0]}", f"the shard has no such tensor, {index.name} says it has")
    return places


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(str(path), f"is not a readable safetensors file: {error}") from error
