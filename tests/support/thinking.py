"""Models with special tokens for reasoning tags, like Qwen 3 and the R1 distillations."""

import json
from pathlib import Path

TAGS = ("<think>", "</think>")


def with_thoughts(folder: Path) -> tuple[int, int]:
    """Turns the last two words of a checkpoint's tokenizer into the tags, and returns their token ids."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    first = len(words) - 2
    lost = {word for word, token_id in words.items() if token_id >= first}
    tokenizer["model"]["vocab"] = {word: token_id for word, token_id in words.items() if word not in lost}
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) not in lost]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [{"id": first + i, "content": tag, **flags} for i, tag in enumerate(TAGS)]
    path.write_text(json.dumps(tokenizer))
    return first, first + 1
