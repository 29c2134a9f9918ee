"""Finds models by name: a folder, or org/name[@revision] on a Hugging Face hub, stored in the standard cache.

huggingface_hub downloads them. Its settings apply: HF_HOME (location of the cache), HF_HUB_OFFLINE=1 (use only the
cache), HF_TOKEN (for gated models), HF_ENDPOINT (another hub).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ballast.common.errors import ConfigError

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_VOCABULARY = ("tokenizer*", "vocab.*", "merges.txt", "tekken.json", "*.model", "*.tiktoken", "*_tokens*.json")
_FACTS = ("config.json", "generation_config.json", "*.jinja", *_VOCABULARY)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a model on a hub."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's folder on this machine and its name."""

    folder: Path
    name: str


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A revision of a model in this machine's cache."""

    name: str
    revision: str
    folder: Path
    size_bytes: int
    has_weights: bool


def hub_name(text: str) -> Name | None:
    """Parse the name of a model on a hub; None if the text is an existing path or no such name."""
    found = _NAME.fullmatch(text)
    return Name(found["repo"], found["revision"]) if found is not None and not Path(text).exists() else None


def find_model(model: str | Path, *, weights: bool, check: Callable[[Path], object] | None = None) -> FoundModel:
    """Find a model's folder and name. Missing files of a hub's model are downloaded, with a progress bar on a terminal.

    Args:
        model: A folder, or org/name[@revision].
        weights: Whether to download the tensors, too; configuration and tokenizer are always downloaded.
        check: Called with the folder of config.json before any tensor is downloaded; raises ConfigError if the model
            cannot be served.

    Raises:
        ConfigError: the model is neither a folder nor such a name, neither hub nor cache have it, or `check` failed;
            the message says what to do.
    """
    text = str(model)
    name = hub_name(text)
    if name is None:
        folder = Path(text)
        if not folder.is_dir():
            raise ConfigError(
                "model", f"{text!r} is no folder on this machine, and no name like org/name[@revision] of a hub"
            )
        if check is not None:
            check(folder)
        return FoundModel(folder, folder.resolve().name)
    folder = _fetched(name, _FACTS)
    if check is not None:
        check(folder)
    if weights:
        folder = _fetched(name, (*_FACTS, *_WEIGHTS))
        if not any(folder.glob("*.safetensors")):
            raise ConfigError(str(name), "has no *.safetensors files; Ballast reads no other format")
    return FoundModel(folder, name.repo)


def cached_models() -> Iterator[CachedModel]:
    """Models in this machine's cache, sorted by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash):
            names = {file.file_name for file in revision.files}
            has_weights = any(name.endswith(".safetensors") for name in names)
            yield CachedModel(
                repo.repo_id, revision.commit_hash, revision.snapshot_path, revision.size_on_disk, has_weights
            )


def _fetched(name: Name, patterns: tuple[str, ...]) -> Path:
    """Download the files that match these patterns. Returns the snapshot's folder."""
    from huggingface_hub import (
        constants,
        snapshot_download,  # pyright: ignore[reportUnknownVariableType] -- its callback's type is open
    )
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = str(name)
    try:
        return Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ConfigError(where, "is gated: ask for access on its page, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(where, f"is not at {constants.ENDPOINT}; if it is private, set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ConfigError(where, f"has no revision {name.revision!r}; try one of its page's branches") from error
    except LocalEntryNotFoundError as error:
        told = "and HF_HUB_OFFLINE=1 forbids downloads" if constants.HF_HUB_OFFLINE else "and the hub is out of reach"
        raise ConfigError(where, f"is not in the cache {constants.HF_HUB_CACHE}, {told}; or name a folder") from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(where, f"cannot be fetched from {constants.ENDPOINT}: {error}") from error
