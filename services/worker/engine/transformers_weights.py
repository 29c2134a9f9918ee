"""Reads a checkpoint's tensors under the names and in the shapes of `transformers`' modelling code.

Parameters are read and converted one at a time by `transformers` itself (names, joined matrices, merged experts),
copied to our memory and freed, so the extra memory is at most twice the largest parameter. They are read on the calling
thread, because every thread of a pool would retain memory in its own malloc arena.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from ballast.common.errors import ConfigError
from services.worker.engine.checkpoint import FLOAT_DTYPES, IGNORED_SUFFIXES, tensor_places
from services.worker.engine.model_config import read_json
from services.worker.engine.packed_parameters import PackedParameter, packed_parameters, part_name
from services.worker.engine.parameters import EMBEDDING, HEAD
from services.worker.engine.quantised import QuantisedMatrix, find_quantised, quantisation_of

os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

Part = int | str
_TEXT = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")  # the text decoder's prefix
_HEAD = "lm_head."
_NOT_THERE = "the checkpoint has no tensor that this is made of"
_OF_THE_WHOLE = re.compile(r"\^|language_model")  # source patterns that only match a multimodal model's names


@dataclass(frozen=True, slots=True)
class Parts:
    """Tensors of each part by their full names in the model; a tied tensor is listed once, under its first name."""

    layers: tuple[Mapping[str, torch.Tensor], ...]
    others: Mapping[str, Mapping[str, torch.Tensor]]

    def of(self, part: Part) -> Mapping[str, torch.Tensor]:
        return self.layers[part] if isinstance(part, int) else self.others[part]


def parts_of(model: Any, layers_name: str, layer_count: int, dtype: torch.dtype) -> Parts:
    """Parts of a model on the meta device, in `dtype` except for tensors that its class keeps in float32."""
    plan = model._get_dtype_plan(dtype)
    wide = build_glob_alternation(list(plan))[0] if plan else None
    layers: list[dict[str, torch.Tensor]] = [{} for _ in range(layer_count)]
    others: dict[str, dict[str, torch.Tensor]] = {EMBEDDING: {}, HEAD: {}}
    inputs = model.get_input_embeddings()
    first = {id(tensor) for tensor in inputs.parameters()}
    prefix = layers_name + "."
    persistent = set(model.state_dict())
    for name, tensor in [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in persistent)]:
        if wide is not None and tensor.is_floating_point() and wide.search(name):
            tensor.data = tensor.data.to(torch.float32)
        if name.startswith(prefix):
            layers[int(name[len(prefix) :].partition(".")[0])][name] = tensor
        else:
            others[EMBEDDING if id(tensor) in first else HEAD][name] = tensor
    return Parts(tuple(layers), others)


def text_names(names: Iterable[str], base: str, *, within: bool = False) -> dict[str, str]:
    """Map tensor names of a text decoder, whose layers are under `base`, to names in the checkpoint. `within`: the
    checkpoint is of a multimodal model, whose other tensors are left out.
    """
    found: dict[str, str] = {}
    for name in names:
        rest, inside = _TEXT.subn("", name)
        if inside or name.startswith(_HEAD):
            found[rest if rest.startswith(_HEAD) else f"{base}.{rest}"] = name
    if any(map(_TEXT.match, found.values())):
        return found
    own = (f"{base}.", _HEAD) if within else ""
    return {name: name for name in names if name.startswith(own)}


def has_head(model_dir: Path) -> bool:
    """True if the checkpoint stores an LM head. False if its tensor files are missing."""
    places = tensor_places(model_dir) if any(model_dir.glob("*.safetensors")) else ()
    return any(name.startswith(_HEAD) for name in text_names(places, "model"))


class TransformersCheckpoint:
    """An open checkpoint, accessed by the tensor names of a model on the meta device."""

    def __init__(
        self,
        model_dir: Path,
        model: Any,
        parts: Parts,
        dtype: torch.dtype,
        packed: Mapping[str, PackedParameter] | None = None,
        cut: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
    ) -> None:
        """`packed`: parameters that stay quantised. `cut`: (name, tensor) -> the share kept in memory.

        Raises:
            ConfigError: the folder has no tensors, or lacks some that its index names.
        """
        self._model_dir, self._model, self._parts, self._dtype = model_dir, model, parts, dtype
        files = tensor_places(model_dir)
        told = read_json(model_dir / "config.json")
        whole, text = told.get("model_type"), model.config.model_type
        base = next(iter(parts.others[EMBEDDING])).partition(".")[0]  # Llama 4 has another `base_model_prefix`
        base = model.base_model_prefix if hasattr(model, model.base_model_prefix) else base
        self._stored_as = text_names([*files], base, within=whole != text)
        self._files_of = {name: files[stored] for name, stored in self._stored_as.items()}
        self._places = dict(self._files_of)  # quantised matrices have their dense equivalents' names
        self._files: dict[Path, Any] = {}
        self._mapping: list[Any] = get_model_conversion_mapping(model)
        if whole != text and get_checkpoint_conversion_mapping(text) is None:
            ours = get_checkpoint_conversion_mapping(str(whole)) or []  # some apply to its decoder, too
            self._mapping += [one for one in ours if not any(map(_OF_THE_WHOLE.match, one.source_patterns))]
        self._plan = model._get_dtype_plan(dtype)
        self._packed, self._cut = packed or {}, cut
        self._matrices: dict[str, QuantisedMatrix] = {}
        quantisation = quantisation_of(model_dir, told)
        if quantisation is not None:
            self._matrices, used = find_quantised(self._files_of, quantisation, self._stored)
            dense = {key: file for key, file in self._places.items() if key not in used}
            self._places = dense | dict.fromkeys(self._matrices, model_dir)
        self._sources, self._unknown = self._map()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def packed_parameters(self) -> dict[str, PackedParameter]:
        """Parameters of a dense model that can stay quantised."""
        return packed_parameters(self._model, self._patterns, self._converters, self._matrices)

    @property
    def _converters(self) -> list[WeightConverter]:
        return [entry for entry in self._mapping if isinstance(entry, WeightConverter)]

    def _map(self) -> tuple[dict[str, list[str]], list[str]]:
        """Returns (model tensor -> the checkpoint tensors that it is made of, unused checkpoint tensors). A checkpoint
        tensor that is split is listed only under the first model tensor made from it.
        """
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = self._converters
        prefix, state = self._model.base_model_prefix, self._model.state_dict() | dict.fromkeys(self._packed, True)
        sources: dict[str, list[str]] = {}
        self._patterns: dict[str, list[tuple[str, str | None]]] = {}
        unknown: list[str] = []
        for key in sorted(self._places, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            if name in state:
                sources.setdefault(name, []).append(key)
                self._patterns.setdefault(name, []).append((key, pattern))
            else:
                unknown.append(key)
        return sources, unknown

    def require_only(self) -> None:
        """Raise ConfigError if the checkpoint contains a tensor that the model neither uses nor
        declares as ignorable, or lacks the embedding. Reads names only.
        """
        embedding = next(iter(self._parts.others[EMBEDDING]))
        if not any(name in self._sources for name in (embedding, *self._aliases(embedding))):
            raise ConfigError(f"{self._model_dir}: {embedding}", _NOT_THERE)
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        for key in self._unknown:
            if not key.endswith(IGNORED_SUFFIXES) and not any(re.search(pattern, key) for pattern in patterns):
                raise ConfigError(f"{self._places[key]}: {key}", f"is not a tensor of {type(self._model).__name__}")

    def fill(self, part: Part, stored: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of a part to its memory.

        Raises:
            ConfigError: a tensor is missing, has a wrong shape, or cannot be read.
        """
        left = dict(self._parts.of(part))
        for name, packed in self._packed.items():
            theirs = [part_name(name, piece) for piece in packed.packing.specs]
            if theirs[0] in left:
                packed.fill(name, stored, self._matrices)
                for piece in theirs:
                    del left[piece]
        for name in [*left]:
            if name in left:
                self._convert(self._sources_of(name, left))
                self._take(left, stored)
        if left:
            name = next(iter(left))
            raise ConfigError(f"{self._model_dir}: {name}", _NOT_THERE)

    def _sources_of(self, name: str, left: Iterable[str]) -> list[str]:
        """Checkpoint tensors of a model tensor, or of the tensor that it is tied to. A split checkpoint tensor is
        listed only for the first tensor made from it; the list is empty for the others.
        """
        if (found := self._sources.get(name)) is not None:
            self._require_tied(name, found)
            return found
        for alias in self._aliases(name):
            if (found := self._sources.get(alias)) is not None:
                return found
        return []

    def _aliases(self, name: str) -> list[str]:
        tied = getattr(self._model, "all_tied_weights_keys", {})
        return [*(target for target, source in tied.items() if source == name), *([tied[name]] if name in tied else [])]

    def _require_tied(self, name: str, sources: list[str]) -> None:
        for alias in self._aliases(name):
            other = self._sources.get(alias)
            if other is None or len(other) != 1 or len(sources) != 1:
                continue
            if not torch.equal(self._slice(sources[0])[...], self._slice(other[0])[...]):
                why = f"config.json ties it to {other[0]}, which has other values; set tie_word_embeddings to false"
                raise ConfigError(f"{self._places[sources[0]]}: {sources[0]}", why)

    def _convert(self, sources: list[str]) -> None:
        if not sources:
            return
        given = {key: self._slice(key) for key in sources}
        config = LoadStateDictConfig(weight_mapping=self._mapping, dtype=self._dtype, dtype_plan=self._plan)
        try:
            info, _ = convert_and_load_state_dict_in_model(self._model, given, config)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self._places[sources[0]]}: {sources[0]}", f"cannot be read: {error}") from error
        if info.mismatched_keys:
            name, shape, wanted = next(iter(info.mismatched_keys))
            why = f"has shape {list(shape)}, config.json asks for {list(wanted)}"
            raise ConfigError(f"{self._places[sources[0]]}: {name}", why)
        if info.conversion_errors or info.error_msgs:
            name, why = next(iter(info.conversion_errors.items()), (sources[0], "; ".join(info.error_msgs)))
            raise ConfigError(f"{self._places[sources[0]]}: {name}", f"cannot be converted: {why}")

    def _take(self, left: dict[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> None:
        """Copy the converted tensors to their destinations and put the model back on the meta device."""
        for name in [*left]:
            for held in (name, *self._aliases(name)):
                path, _, leaf = held.rpartition(".")
                module = self._model.get_submodule(path)
                tensor = getattr(module, leaf)
                if tensor.device.type == "meta":
                    continue
                with torch.no_grad():
                    stored[name].copy_(self._cut(name, tensor))
                nothing = torch.empty_like(left[name], device="meta")
                if leaf in module._parameters:
                    setattr(module, leaf, nn.Parameter(nothing, requires_grad=False))
                else:
                    module._buffers[leaf] = nothing
                del left[name]
                break

    def _slice(self, key: str) -> Any:
        if (matrix := self._matrices.get(key)) is not None:
            return matrix
        tensor, where = self._stored(key), f"{self._places[key]}: {key}"
        if (dtype := str(tensor.get_dtype())) not in FLOAT_DTYPES:
            raise ConfigError(where, f"has dtype {dtype}, supported are {', '.join(FLOAT_DTYPES)}")
        return tensor

    def _stored(self, key: str) -> Any:
        path = self._files_of[key]
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt", device="cpu")
            return self._files[path].get_slice(self._stored_as[key])
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: {key}", f"cannot be read: {error}") from error
