import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ballast.common.errors import ConfigError
from services.worker.engine.model_config import RopeConfig, RopeKind, read_model_config
from services.worker.engine.rotary import inverse_frequencies
from tools.model.tiny import make_tiny

Edit = Callable[..., Path]


@pytest.fixture
def edit(model_dir: Path) -> Edit:
    def change(**values: object) -> Path:
        path = model_dir / "config.json"
        config = json.loads(path.read_text()) | values
        path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
        return model_dir

    return change


def test_a_config_is_read(model_dir: Path) -> None:
    config = read_model_config(model_dir)
    assert (config.layer_count, config.hidden_size, config.vocab_size, config.max_position) == (2, 64, 320, 256)
    assert (config.head_count, config.kv_head_count, config.head_dim) == (4, 2, 16)
    assert config.rope == RopeConfig(kind=RopeKind.DEFAULT, theta=10_000.0)
    assert not config.has_qkv_bias
    assert not config.tied_embeddings


def test_numbers_may_be_written_as_text_and_heads_omitted(model_dir: Path, edit: Edit) -> None:
    plain = read_model_config(model_dir)
    written = {"hidden_size": str(plain.hidden_size), "rms_norm_eps": str(plain.rms_norm_eps)}
    assert read_model_config(edit(**written)) == plain
    heads = edit(num_key_value_heads=None)
    assert read_model_config(heads).kv_head_count == plain.head_count


def test_end_tokens_come_from_the_generation_config_first(model_dir: Path, edit: Edit) -> None:
    edit(eos_token_id=5)
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, 7]}))
    assert read_model_config(model_dir).eos_token_ids == (7, 8)
    (model_dir / "generation_config.json").write_text("{}")
    assert read_model_config(model_dir).eos_token_ids == (5,)
    (model_dir / "generation_config.json").unlink()
    assert read_model_config(model_dir).eos_token_ids == (5,)
    edit(eos_token_id=None)
    assert read_model_config(model_dir).eos_token_ids == ()


@pytest.mark.parametrize(
    ("values", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(kind=RopeKind.DEFAULT, theta=5e5)),
        ({"rope_theta": "absent"}, RopeConfig(kind=RopeKind.DEFAULT, theta=1e4)),
        (
            {"rope_theta": "absent", "rope_parameters": {"rope_theta": 7e4, "rope_type": "default"}},
            RopeConfig(kind=RopeKind.DEFAULT, theta=7e4),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeConfig(kind=RopeKind.LINEAR, theta=1e4, factor=4.0),
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, RopeConfig(kind=RopeKind.DYNAMIC, theta=1e4)),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
            RopeConfig(
                kind=RopeKind.LLAMA3,
                theta=1e4,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position=256,
            ),
        ),
    ],
)
def test_both_spellings_of_rope_are_read_and_give_the_frequencies_of_transformers(
    edit: Edit, values: dict[str, object], rope: RopeConfig
) -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model_dir = edit(**values)
    config = read_model_config(model_dir)
    assert config.rope == rope
    reference = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(model_dir))
    assert torch.equal(inverse_frequencies(rope, config.head_dim), reference.inv_freq)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: .* not supported"),
        ({"architectures": None}, "architectures: None is not supported"),
        ({"hidden_size": "absent"}, "hidden_size: is missing"),
        ({"hidden_size": "many"}, "hidden_size: must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be a whole number of at least 1"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of 3 KV heads"),
        ({"head_dim": 7}, "head_dim: must be even"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps: must be a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: must be true or false"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type: 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: is missing"),
        ({"rope_scaling": [1]}, "rope_scaling: must be an object"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor: 4.0 must be less than high_freq_factor",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: rotating only a part"),
        ({"quantization_config": {"bits": 4}}, "our own classes compute no quantised checkpoints"),
        ({"eos_token_id": "x"}, "eos_token_id: must be a token id"),
    ],
)
def test_unsupported_configs_are_refused(model_dir: Path, edit: Edit, values: dict[str, object], message: str) -> None:
    (model_dir / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match=message) as refused:
        read_model_config(edit(**values))
    assert str(model_dir / "config.json") in str(refused.value)


@pytest.mark.parametrize(("content", "message"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object")])
def test_a_damaged_config_is_refused(model_dir: Path, content: str, message: str) -> None:
    (model_dir / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_model_config(model_dir)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json: no such file; is this the folder"):
        read_model_config(tmp_path)


def test_a_sliding_window_shortens_the_longest_sequence(tmp_path: Path) -> None:
    model_dir = make_tiny("mistral", tmp_path / "m", layers=1, max_len=512)
    path = model_dir / "config.json"
    plain = json.loads(path.read_text())
    for window, longest in ((None, 512), (100, 100), (1000, 512)):
        path.write_text(json.dumps(plain | {"sliding_window": window}))
        assert read_model_config(model_dir).max_position == longest


def test_qwens_use_sliding_window_flag_is_followed(tmp_path: Path) -> None:
    model_dir = make_tiny("qwen2", tmp_path / "m", layers=1, max_len=512)
    path = model_dir / "config.json"
    plain = json.loads(path.read_text()) | {"sliding_window": 64}
    for switch, longest in ((False, 512), (True, 64)):
        path.write_text(json.dumps(plain | {"use_sliding_window": switch}))
        assert read_model_config(model_dir).max_position == longest
