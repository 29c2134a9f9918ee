"""Trains a byte-level BPE tokenizer for the small random checkpoints of `make-tiny`.

The corpus is built in and, beyond its prose, generated from a fixed seed, so that the same vocabulary size always gives
the same tokenizer. It has multi-byte characters, some of which are split over several tokens, as in published
tokenizers, because incremental detokenisation has to handle these.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ballast.common.errors import ConfigError

BOS, EOS, PAD, TURN_START, TURN_END = "<|bos|>", "<|eos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, TURN_START, TURN_END)  # ids 0..4, in this order
BOS_ID, EOS_ID, PAD_ID, TURN_START_ID, TURN_END_ID = range(len(SPECIAL_TOKENS))
MIN_VOCAB = 256 + len(SPECIAL_TOKENS)

_PROSE = """\
A ship that carries no cargo takes stones on board so that the wind does not turn it over.
When goods are loaded, the stones go into the water, and the place they held is free.
The captain counts the barrels, the crates and the casks, and writes their number in the book.
How many boats are in the harbour today? Twelve, thirteen, fourteen; yesterday there were 27, tomorrow 1,405.
def weigh(stones: list[int]) -> int:
    total = 0
    for stone in stones:
        total += stone
    return total
Ein Schiff fährt über das Meer, und die Wellen schlagen höher; größer als gestern. Où est l'île où naît l'été?
船は港を出て、北へ向かった。港口的石头很重。 Корабль ушёл в море.  🚢⚓🌊 naïve café — “quoted” … €5, 10 °C.
"""
_SYLLABLES = [
    "ba",
    "be",
    "bo",
    "da",
    "del",
    "do",
    "en",
    "er",
    "est",
    "fa",
    "fi",
    "gar",
    "go",
    "han",
    "hel",
    "in",
    "is",
    "ja",
    "ka",
    "ker",
    "la",
    "lan",
    "len",
    "li",
    "lo",
    "lun",
    "ma",
    "mer",
    "mi",
    "mo",
    "na",
    "nen",
    "no",
    "or",
    "pa",
    "pel",
    "ra",
    "ren",
    "ri",
    "ro",
    "sa",
    "sen",
    "si",
    "sol",
    "ta",
    "ten",
    "ti",
    "tor",
    "ul",
    "um",
    "va",
    "ven",
    "vi",
    "wa",
    "wen",
    "yo",
    "zan",
]
_WORDS_PER_LINE = 12
# The expression by which Qwen's tokenizers split text. `transformers` uses it for every Qwen2 checkpoint, whatever its
# file contains.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(vocab_size: int, *, qwen: bool) -> Tokenizer:
    """Train a byte-level BPE tokenizer with exactly `vocab_size` entries, special tokens first.

    `qwen`: split digits one by one and prepend no beginning-of-sequence token, like Qwen's tokenizers.
    """
    if vocab_size < MIN_VOCAB:
        raise ConfigError("vocab", f"must be at least {MIN_VOCAB} (256 bytes and the special tokens), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    if qwen:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=0,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(vocab_size), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError("vocab", f"the built-in text gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    if not qwen:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
        )
    return tokenizer


def _corpus(vocab_size: int) -> Iterator[str]:
    """The prose, followed by invented words, enough of them for the merges that the vocabulary needs."""
    yield from _PROSE.splitlines(keepends=True)
    rng = random.Random(20260)
    lexicon = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(vocab_size)]
    for start in range(0, len(lexicon), _WORDS_PER_LINE):
        yield " ".join(lexicon[start : start + _WORDS_PER_LINE]) + ".\n"


def write_tokenizer(out: Path, vocab_size: int, *, qwen: bool, max_len: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, chat template included."""
    train_tokenizer(vocab_size, qwen=qwen).save(str(out / "tokenizer.json"))
    config = {
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL_TOKENS)
        },
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": ("" if qwen else "{{ bos_token }}") + _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_len,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
