"""The tokenizer of a checkpoint, as dispatchers and workers load it."""

from pathlib import Path

from tokenizers import Tokenizer

from ballast.common.errors import ConfigError


def load_tokenizer(model: Path) -> Tokenizer:
    """Load `tokenizer.json` of a checkpoint, and disable padding and truncation, which training may have enabled.

    Raises:
        ConfigError: the file is missing or corrupt.
    """
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            str(path), f"no such file; if {model} has vocabulary files, `ballast model fetch {model}` makes it"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(str(path), f"is not a valid tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
