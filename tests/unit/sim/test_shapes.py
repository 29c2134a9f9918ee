"""Any config.json has a size, and the same one as in the catalogue."""

import json
from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from sim.hardware import find_cluster, find_gpu, find_model
from sim.jobs.scenarios import model_of
from sim.shapes import spec_of_config
from tools.model.info import read_info
from tools.model.tiny import make_preset

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
LLAMA_70B = QWEN | {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
QWEN3_235B = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 4096,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
QWEN3_30B = QWEN3_235B | {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
}
MIXTRAL = LLAMA_70B | {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
SAME = (
    "parameter_count",
    "layer_count",
    "hidden_size",
    "attention_width",
    "kv_elements_per_token_layer",
    "vocab_size",
    "max_model_len",
    "experts_per_layer",
    "experts_per_token",
    "expert_parameter_count",
)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Qwen2.5-14B", QWEN),
        ("Llama-3.1-70B", LLAMA_70B),
        ("Qwen3-235B", QWEN3_235B),
        ("Qwen3-30B-A3B", QWEN3_30B),
        ("Mixtral-8x7B", MIXTRAL),
    ],
)
def test_counted_from_its_config_a_model_of_the_catalogue_is_the_same(name: str, config: dict[str, object]) -> None:
    counted, known = spec_of_config(name, config, find_gpu("A800", "gpu")), find_model(name)
    assert {field: getattr(counted, field) for field in SAME} == {field: getattr(known, field) for field in SAME}
    # In embedding and head; the last norm is counted there, too.
    assert counted.other_parameter_count - known.other_parameter_count in (0, known.hidden_size)


def test_a_checkpoint_has_as_many_parameters_as_its_config_says(tmp_path: Path) -> None:
    for name in ("demo", "tiny"):
        folder = make_preset(name, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        spec = spec_of_config(name, config, find_gpu("L4", "gpu"))
        assert spec.parameter_count == read_info(folder).parameter_count


def test_an_instance_takes_as_few_gpus_as_leave_room_for_kv() -> None:
    sizes = {name: spec_of_config("m", QWEN, find_gpu(name, "gpu")).gpus_per_instance for name in ("A800", "L4")}
    assert sizes == {"A800": 1, "L4": 2}
    assert spec_of_config("m", LLAMA_70B, find_gpu("H100", "gpu")).gpus_per_instance == 4


def test_a_folder_names_a_model_for_simulations(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(QWEN))
    found = model_of(str(tmp_path / "mine"), find_cluster("8xA800").gpu)
    assert (found.name, found.parameter_count) == ("mine", find_model("Qwen2.5-14B").parameter_count)
    assert model_of("qwen2.5-14b", find_cluster("8xA800").gpu).source != found.source


def test_what_cannot_be_counted_is_said() -> None:
    gpu = find_gpu("A800", "gpu")
    with pytest.raises(ConfigError, match=r"config\.json: hidden_size: must be a whole number"):
        spec_of_config("m", {key: value for key, value in QWEN.items() if key != "hidden_size"}, gpu)
    with pytest.raises(ConfigError, match="kv_lora_rank: layers of this kind cannot be counted"):
        spec_of_config("m", QWEN | {"kv_lora_rank": 512}, gpu)
    with pytest.raises(ConfigError, match="does not fit into 64 L4"):
        spec_of_config("m", LLAMA_70B | {"num_hidden_layers": 1000}, find_gpu("L4", "gpu"))
