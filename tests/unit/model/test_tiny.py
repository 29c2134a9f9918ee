"""`transformers` loads the tiny checkpoints, and their greedy decoding is suited to comparisons."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ballast.common.errors import ConfigError
from tools.model.safetensors_file import read_header, write_safetensors
from tools.model.tiny import ARCHITECTURES, PRESETS, make_preset, make_tiny
from tools.model.tokenizer import SPECIAL_TOKENS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
transformers.logging.disable_progress_bar()

TEXTS = (
    "Hello wörld 1234 the  ship's",
    "a\n\n b\t船は 🚢⚓ don't",
    "<|im_start|>user\nhi<|im_end|>",
)


def _digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_loads_and_decodes_it(arch: str, tied: bool, tmp_path: Path) -> None:
    path = make_tiny(arch, tmp_path / "m", tied=tied, shards=2)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert type(model).__name__ == ARCHITECTURES[arch].class_name
    assert model.dtype is torch.float32

    tokens: list[int] = []
    gaps: list[float] = []
    for seed in range(4):
        prompt = torch.randint(5, 512, (1, 20), generator=torch.Generator().manual_seed(seed))
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=48,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens += out.sequences[0, 20:].tolist()
        gaps += [float(best[0] - best[1]) for best in (step[0].topk(2).values for step in out.logits)]
    assert len(set(tokens)) > 20, "decoding has fallen into a loop"
    assert sum(gaps) / len(gaps) > 0.5, "the logits are too close together to compare tokens"
    assert min(gaps) > 1e-5, "two logits nearly tie"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tokenizer_agrees_with_transformers(arch: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = make_tiny(arch, tmp_path / "m")
    ours = Tokenizer.from_file(str(path / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    assert len(theirs) == ours.get_vocab_size() == 512
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"]
        assert theirs.decode(ids).removeprefix("<|bos|>") == text
    assert [ours.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert theirs.eos_token_id == json.loads((path / "generation_config.json").read_text())["eos_token_id"][0]
    chat = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.removeprefix("<|bos|>") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.startswith("<|bos|>") != ARCHITECTURES[arch].qwen
    with pytest.raises(Exception, match="unknown role: robot"):
        theirs.apply_chat_template([{"role": "robot", "content": "hi"}], tokenize=False)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes_load(dtype: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(make_tiny("llama", tmp_path / "m", dtype=dtype))
    assert model.dtype is getattr(torch, dtype)


def test_bfloat16_rounds_like_torch_and_the_header_reads_back(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    array = np.random.default_rng(1).standard_normal((7, 33)) * 1e3
    array[0, :3] = [1.00390625, 1.01171875, 0.0]  # halfway between two bf16 numbers: to even, down and up
    write_safetensors(tmp_path / "x.safetensors", {"a": array, "b": array[:0]}, "bfloat16")
    loaded = load_file(tmp_path / "x.safetensors")
    assert torch.equal(loaded["a"], torch.from_numpy(array.astype("float32")).to(torch.bfloat16))
    header = read_header(tmp_path / "x.safetensors")
    assert header["a"].dtype == "BF16"
    assert header["a"].shape == (7, 33)
    assert header["b"].element_count == 0


def test_same_arguments_same_bytes_in_another_process(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tools.model.tiny import make_tiny\n"
    code += "make_tiny('qwen3', Path(sys.argv[1]), seed=7, vocab=700, shards=3)\n"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=True, env={"PYTHONHASHSEED": "5"}, cwd=".")
    make_tiny("qwen3", tmp_path / "b", seed=7, vocab=700, shards=3)
    assert _digest(tmp_path / "a") == _digest(tmp_path / "b")
    make_tiny("qwen3", tmp_path / "c", seed=8, vocab=700, shards=3)
    assert (
        _digest(tmp_path / "c")["model-00001-of-00003.safetensors"]
        != _digest(tmp_path / "b")["model-00001-of-00003.safetensors"]
    )


def test_llama3_short_contexts_reach_all_bands_of_the_rope_scaling(tmp_path: Path) -> None:
    config = json.loads((make_tiny("llama3", tmp_path / "m") / "config.json").read_text())
    scaling = config["rope_scaling"]
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, 16, 2) / 16)
    longest = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    shortest = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    assert np.any(wavelengths < shortest)
    assert np.any((wavelengths > shortest) & (wavelengths < longest))
    assert np.any(wavelengths > longest)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"arch": "gpt2"}, "arch: unknown: 'gpt2'"),
        ({"dtype": "int8"}, "dtype"),
        ({"hidden": 65}, "hidden: 65 is not a multiple of 4 heads"),
        ({"kv_heads": 3}, "heads: 4 is not a multiple of 3"),
        ({"head_dim": 15}, "head_dim: must be even"),
        ({"layers": 0}, "layers: must be at least 1"),
        ({"vocab": 100}, "vocab: must be at least 261"),
        ({"shards": 99}, "shards: must be between 1 and 39"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], named: str, tmp_path: Path) -> None:
    every: dict[str, Any] = {"arch": "llama", "out": tmp_path / "m"} | arguments
    with pytest.raises(ConfigError, match=named):
        make_tiny(**every)


def test_a_folder_that_is_not_empty_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        make_tiny("llama", tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_presets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are tiny, demo, ballast, ballast-half, bench"):
        make_preset("huge", tmp_path / "m")
    for preset in PRESETS:
        make_preset(preset, tmp_path / preset)
        assert json.loads((tmp_path / preset / "config.json").read_text())["vocab_size"] == PRESETS[preset].vocab
