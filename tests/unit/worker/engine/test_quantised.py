"""Tests of quantised checkpoints other than their tokens: memory, dtypes other than float32, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ballast.common.errors import ConfigError
from services.worker.core.batch import Slice
from services.worker.engine import scaled_products, transformers_model
from services.worker.engine.division import Division, RankCut
from services.worker.engine.load import load_engine
from services.worker.engine.packed_parameters import PackedParameter, Placed, divided
from services.worker.engine.quantised import Number, Packing, quantisation_of
from services.worker.engine.transformers_model import TransformersDecoder
from tests.support.engine import forward
from tests.support.families import write_family
from tests.support.quantised import FORMATS

MEMORY_BYTES = 8 << 20


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_moe:fp8", tmp_path_factory.mktemp("fp8"))


def test_quantised_parameters_stay_quantised_in_memory_and_in_counts(fp8: Path, tmp_path: Path) -> None:
    with load_engine(fp8, dtype="bfloat16", device_memory_bytes=MEMORY_BYTES) as engine:
        assert engine.implementation.quantised == "fp8"
        names = engine.memory.parameters.layer(0)
        values = names["model.layers.0.mlp.experts.gate_up_proj_values"]
        assert (values.dtype, tuple(values.shape)) == (torch.uint8, (4, 96, 64))
        assert engine.memory.parameters.layer(0)["model.layers.0.mlp.experts.gate_up_proj_scales"].shape == (4, 6, 4)
        dense_bytes = 2 * engine.info.parameter_count
        assert sum(engine.info.layer_parameter_bytes) + engine.info.other_parameter_bytes < 0.75 * dense_bytes
        assert isinstance(engine.model, TransformersDecoder)
        layer: Any = engine.model.layers[0]
        experts = layer.mlp.experts
        assert torch.equal(experts.down_proj[2], torch.stack([experts.down_proj[e] for e in range(4)])[2])
        assert torch.equal(experts.down_proj[torch.tensor(1)], torch.clone(experts.down_proj)[1])
    with load_engine(write_family("qwen3_moe", tmp_path), device_memory_bytes=MEMORY_BYTES) as engine:
        assert engine.implementation.quantised is None
        assert engine.info.parameter_count * 2 == dense_bytes


def test_experts_whose_halves_share_blocks_are_made_dense_when_they_are_loaded(tmp_path: Path) -> None:
    folder = write_family("qwen3_moe:fp8 ragged", tmp_path)  # each half has 48 rows, and blocks have 40
    with load_engine(folder, device_memory_bytes=MEMORY_BYTES) as engine:
        names = engine.memory.parameters.layer(0)
        assert names["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.float32
        assert names["model.layers.0.mlp.experts.down_proj_values"].dtype == torch.uint8


@pytest.mark.parametrize(("rows", "multiplied"), [(64, True), (48, False)])
def test_a_share_is_multiplied_in_float8_if_its_own_size_allows_it(rows: int, multiplied: bool) -> None:
    packing = Packing(shape=(rows, 32), number=Number.FP8, block=(1, 32), scale_dtype=torch.float32)
    whole = PackedParameter(packing, [Placed("matrix")], multiplied=True)
    share = divided(whole, RankCut(-2), Division(0, 2, lambda _: None))
    assert share is not None
    assert share.packing.shape == (rows // 2, 32)
    assert share.multiplied == multiplied


@pytest.mark.parametrize("form", ["fp8 channels", "fp8 tensors"])
def test_matrices_are_multiplied_in_float8_where_the_device_does_so(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This requires a checkpoint that declares float8 activations. A row's result does not depend on the other rows."""
    if not scaled_products.succeeds(torch.device("cpu")):
        pytest.skip("torch 2.11 multiplies with one scale for all rows on CPUs")
    folder = write_family(f"llama:{form}", tmp_path)
    prompt = tuple(range(5, 45))

    def logits(sizes: tuple[int, ...]) -> torch.Tensor:
        found, done = list[torch.Tensor](), 0
        with load_engine(folder, dtype="bfloat16", device_memory_bytes=MEMORY_BYTES) as engine:
            products.clear()
            for size in sizes:
                part = Slice(0, done, prompt[done : done + size], True)
                found += forward(engine, [part], [tuple(range(-(-len(prompt) // engine.block_tokens)))])
                done += size
            assert engine.implementation.quantised == "fp8"
        return torch.cat(found)

    products: list[int] = []
    with monkeypatch.context() as patch:
        multiply = scaled_products.product

        def counted(*given: Any) -> torch.Tensor:
            products.append(1)
            return multiply(*given)

        def yes(_: torch.device) -> bool:
            return True

        patch.setattr(scaled_products, "product", counted)
        dequantised = logits((40,))
        assert not products
        patch.setattr(transformers_model, "device_multiplies", yes)
        logits((40,))
        assert not products  # config.json does not declare float8 activations
        config = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
        for group in config.values():
            group["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
        changed(folder, {"config_groups": config})
        whole = logits((40,))
        assert len(products) == 4 * 7  # layers, linears
        torch.testing.assert_close(logits((1, 30, 9)), whole, rtol=0.02, atol=0.02 * float(whole.abs().max()))
    apart = float((whole - dequantised).std() / dequantised.std())
    assert 1e-3 < apart < 0.15


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [(96, 1), (1, 1)])
def test_on_a_gpu_products_in_float8_are_near_those_of_dequantised_matrices(scales: tuple[int, int]) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    tensors = {"values": torch.randn(96, 256).to(torch.float8_e4m3fn).view(torch.uint8).to(device)}
    tensors["scales"] = torch.rand(scales, device=device) + 0.5
    packing = Packing(shape=(96, 256), number=Number.FP8, block=(96 // scales[0], 256), scale_dtype=torch.float32)
    x = torch.randn(37, 256, dtype=torch.bfloat16, device=device)
    wanted = x @ packing.dense(tensors, torch.bfloat16).t()
    if not scaled_products.device_multiplies(device):
        pytest.skip("this GPU, torch or CUDA does not")
    found = scaled_products.product(x, tensors)
    assert float((found - wanted).float().std() / wanted.float().std()) < 0.05


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; these are: fp8, fbgemm_fp8"),
        ({}, "None is not supported"),
        ("fp8", "must be an object"),
        ({"quant_method": "gptq", "bits": 3}, "3 is not supported with gptq"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv' is not supported, gemm is"),
    ],
)
def test_an_unsupported_method_is_refused_by_its_configuration(told: object, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        quantisation_of(tmp_path, {"quantization_config": told})


def changed(folder: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Path:
    told = json.loads((folder / "config.json").read_text())
    told["quantization_config"] |= config or {}
    (folder / "config.json").write_text(json.dumps(told))
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        changes = {name: tensor for name, tensor in tensors.items() if name in held}
        if changes:
            save_file(held | changes, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("form", "config", "tensors", "why"),
    [
        ("fp8", {"weight_block_size": [64, 64]}, {}, "config.json has blocks of"),
        ("fp8", {"weight_block_size": None}, {}, "config.json has blocks of"),
        ("fp8", {}, {"{}.weight": torch.zeros(64, 64, dtype=torch.int8)}, "quantised matrix of I8"),
        ("int8", {}, {"{}.weight": torch.zeros(64, 64)}, "quantised matrix of F32"),
        ("w4a16", {"config_groups": {"g": {"weights": {"num_bits": 3}}}}, {}, "are not supported packed"),
        ("gptq", {"desc_act": True}, {"{}.g_idx": torch.arange(64, dtype=torch.int32) % 4}, "desc_act"),
        ("gptq", {}, {"{}.scales": torch.ones(4, 32, dtype=torch.float16)}, "its scales are of 32 outputs"),
    ],
)
def test_a_matrix_stored_in_an_unexpected_format_is_refused(
    form: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], why: str, tmp_path: Path
) -> None:
    assert form in FORMATS
    folder = write_family(f"llama:{form}", tmp_path)
    named = {name.format("model.layers.1.self_attn.o_proj"): tensor for name, tensor in tensors.items()}
    with pytest.raises(ConfigError, match=why):
        load_engine(changed(folder, config, **named), device_memory_bytes=MEMORY_BYTES)
