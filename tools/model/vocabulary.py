"""Makes `tokenizer.json` for checkpoints that only have the vocabulary files of older tokenizers."""

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from ballast.common.errors import ConfigError
from ballast.common.extras import install_command

_VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")
_SAMPLE = "hello"


def ensure_tokenizer(folder: Path) -> bool:
    """Write `tokenizer.json` if the folder has none but has vocabulary files that `transformers` can convert.

    Returns whether it was written.

    Raises:
        ConfigError: `transformers` is missing or cannot convert these files, or the folder is not writable.
    """
    target = folder / "tokenizer.json"
    found = sorted({path.name for pattern in _VOCABULARIES for path in folder.glob(pattern)})
    if target.is_file() or not found:
        return False
    where, files = str(folder), ", ".join(found)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            where, f"has {files}, but no tokenizer.json, which transformers makes: {install_command('worker')}"
        )
    tokenizer = _convert(folder, files)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer-") as beside:
            made = Path(beside) / target.name
            tokenizer.save(str(made))
            os.replace(made, target)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(str(target), f"cannot be written: {error}") from error
    return True


def _convert(folder: Path, files: str) -> Any:  # Any: a tokenizer of the tokenizers library, without types
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    loader: Any = AutoTokenizer  # without types
    try:
        loaded = loader.from_pretrained(folder, local_files_only=True)
        tokenizer = loaded.backend_tokenizer
        if _SAMPLE not in tokenizer.decode(tokenizer.encode(_SAMPLE).ids).lower():
            raise ValueError(f"the converted tokenizer cannot encode {_SAMPLE!r}")
        return tokenizer
    except Exception as error:  # transformers and its parsers may raise anything for such files
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = f"has no tokenizer.json, and transformers cannot make one from {files}: {first}"
        raise ConfigError(str(folder), why) from error
