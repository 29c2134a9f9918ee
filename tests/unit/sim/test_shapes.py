"""Any config.json yields a model's size, equal to that in the catalogue."""

import json
from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from services.worker.core.batch import Slice
from sim.cost import SimRoofline
from sim.hardware import KvCacheDtype, Quantization, find_cluster, find_gpu, find_model, timings
from sim.jobs.scenarios import model_of
from sim.shapes import spec_of_config, stored_as
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
def test_a_catalogue_models_size_equals_that_counted_from_its_config(name: str, config: dict[str, object]) -> None:
    counted, known = spec_of_config(name, config, find_gpu("A800", "gpu")), find_model(name)
    assert {field: getattr(counted, field) for field in SAME} == {field: getattr(known, field) for field in SAME}
    # Parameters outside layers: embedding and head; the config's count also includes the last norm.
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


GROUPS = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("told", "quantization"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "w4a16"),
        ({"quant_method": "gptq", "bits": 8}, "w8a16"),
        ({"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": GROUPS}}}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": GROUPS | {"type": "int"}, "input_activations": {"num_bits": 8}}},
            },
            "int8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"num_bits": 4, "type": "int"}, "input_activations": None}},
            },
            "w4a16",
        ),
    ],
)
def test_a_quantised_checkpoint_has_the_size_of_its_format(told: dict[str, object], quantization: str) -> None:
    gpu = find_gpu("L4", "gpu")
    dense, found = (spec_of_config("m", QWEN | more, gpu) for more in ({}, {"quantization_config": told}))
    assert found.quantization == quantization
    ends = dense.other_parameter_bytes
    share = {"fp8": 0.5, "mxfp4": 0.27, "w4a16": 0.26, "w8a16": 0.51, "int8": 0.5}[quantization]
    assert found.parameter_bytes - ends == pytest.approx(share * (dense.parameter_bytes - ends), rel=0.02)
    assert (dense.gpus_per_instance, found.gpus_per_instance) == (2, 1)
    assert found.kv_bytes_per_token == dense.kv_bytes_per_token


def test_other_numbers_of_bits_are_not_counted() -> None:
    told = {"quantization_config": {"quant_method": "gptq", "bits": 3}}
    with pytest.raises(ConfigError, match=r"quantization_config: 'gptq' with 3 bits cannot be counted"):
        spec_of_config("m", QWEN | told, find_gpu("L4", "gpu"))


def test_a_model_of_the_catalogue_in_another_format_takes_fewer_gpus() -> None:
    h100 = find_gpu("H100", "gpu")
    sizes = {
        each: stored_as(find_model("Llama-3.1-70B"), h100, each, "fp8_e4m3").gpus_per_instance
        for each in (None, "fp8", "w4a16")
    }
    assert sizes == {None: 4, "fp8": 2, "w4a16": 1}


def times(gpu: str, quantization: Quantization | None, kv_cache_dtype: KvCacheDtype = "auto") -> tuple[float, float]:
    """Seconds per layer: for a prompt of 4,096 tokens, and for a step of 64 decodes with 4,096 tokens of context."""
    cluster = find_cluster(f"1x{gpu}")
    model = stored_as(find_model("Llama-3.1-8B"), cluster.gpu, quantization, kv_cache_dtype)
    costs = SimRoofline(model, cluster, timings()).costs
    return costs.work([Slice(0, 0, (0,) * 4096, True)]).layer_s, costs.decodes(64, 64 * 4096).layer_s


def test_fewer_bits_are_read_faster_and_multiplied_at_the_gpus_speed() -> None:
    (prompt, decode), (fp8_prompt, fp8_decode) = times("H100", None), times("H100", "fp8")
    assert 0.5 < fp8_prompt / prompt < 0.75
    assert fp8_decode < decode
    assert times("H100", "w4a16")[0] == pytest.approx(prompt, rel=0.1)  # computed in bfloat16
    assert times("H100", "w4a16")[1] < fp8_decode
    assert times("A100-80G", "fp8")[0] == pytest.approx(times("A100-80G", None)[0], rel=0.05)  # without FP8 units
    assert times("A100-80G", "int8")[0] < 0.75 * times("A100-80G", None)[0]
    narrow_prompt, narrow_decode = times("H100", None, "fp8_e4m3")
    assert narrow_prompt == prompt
    assert narrow_decode < 0.75 * decode  # most of the step reads KV


def test_a_folder_names_a_model_for_simulations(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(QWEN))
    found = model_of(str(tmp_path / "mine"), find_cluster("8xA800").gpu)
    assert (found.name, found.parameter_count) == ("mine", find_model("Qwen2.5-14B").parameter_count)
    assert model_of("qwen2.5-14b", find_cluster("8xA800").gpu).source != found.source


def test_uncountable_configs_are_refused() -> None:
    gpu = find_gpu("A800", "gpu")
    with pytest.raises(ConfigError, match=r"config\.json: hidden_size: must be a whole number"):
        spec_of_config("m", {key: value for key, value in QWEN.items() if key != "hidden_size"}, gpu)
    with pytest.raises(ConfigError, match="kv_lora_rank: layers of this kind cannot be counted"):
        spec_of_config("m", QWEN | {"kv_lora_rank": 512}, gpu)
    with pytest.raises(ConfigError, match="does not fit into 64 L4"):
        spec_of_config("m", LLAMA_70B | {"num_hidden_layers": 1000}, find_gpu("L4", "gpu"))


def test_a_tied_head_is_read_whole() -> None:
    h100 = find_cluster("1xH100")
    tied, untied = (
        SimRoofline(spec_of_config("m", QWEN | {"tie_word_embeddings": tied}, h100.gpu), h100, timings()).costs
        for tied in (True, False)
    )
    assert tied.head_s == pytest.approx(untied.head_s, rel=1e-3)
    assert tied.head_token_s == pytest.approx(untied.head_token_s, rel=1e-3)
