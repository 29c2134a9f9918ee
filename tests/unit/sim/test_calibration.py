"""The catalogue's figures are compared with published measurements of layers without attention and of all-reduces.

The tables are medians of microsoft/vidur (MIT licence, Copyright (c) Microsoft Corporation), commit 7d47513 of
2024-11-19: `data/profiling/compute/*/mlp.csv` (norms, projections, rope, MLP and two adds of one layer, without the
all-reduces) and `data/profiling/network/{a100,h100}_dgx/all_reduce.csv`, all ranks in one machine.
"""

import pytest

from sim.cost import SimRoofline
from sim.hardware import Cluster, Gpu, ModelSpec, find_gpu, timings
from sim.shapes import spec_of_config

_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
_SHAPES = {  # hidden, heads, key-value heads, intermediate
    "Llama-2-7B": (4096, 32, 32, 11008),
    "Llama-2-70B": (8192, 64, 8, 28672),
    "Qwen-72B": (8192, 64, 64, 24576),
    "Llama-3-8B": (4096, 32, 8, 14336),
    "CodeLlama-34B": (8192, 64, 8, 22016),
    "InternLM-20B": (5120, 40, 40, 13824),
}
_LAYERS_MS = """
A100-80G Llama-2-7B 1 0.305 0.3855 0.5605 1.05 2.135 4.199 8.178
A100-80G Llama-2-7B 2 0.169 0.238 0.334 0.569 1.023 2.128 4.07
A100-80G Llama-2-7B 4 0.106 0.131 0.21 0.324 0.563 1.08 2.163
A100-80G Llama-2-7B 8 0.076 0.095 0.128 0.188 0.337 0.6478 1.33
A100-80G Llama-2-70B 1 1.177 1.361 2.24 4.098 8.511 15.46 30.89
A100-80G Llama-2-70B 2 0.631 0.777 1.135 2.142 4.396 8.05 15.72
A100-80G Llama-2-70B 4 0.3385 0.419 0.644 1.127 2.324 4.212 8.073
A100-80G Llama-2-70B 8 0.193 0.236 0.3865 0.66 1.182 2.349 4.388
A100-80G Qwen-72B 1 1.214 1.276 2.217 4.308 8.662 16.13 32.64
A100-80G Qwen-72B 2 0.6095 0.686 1.099 2.247 4.391 8.387 16.36
A100-80G Qwen-72B 4 0.344 0.412 0.5885 1.067 2.337 4.329 8.565
A100-80G Qwen-72B 8 0.213 0.257 0.369 0.5915 1.224 2.377 4.611
A100-80G Llama-3-8B 1 0.354 0.415 0.613 1.089 2.361 4.516 8.595
A100-80G Llama-3-8B 2 0.188 0.243 0.3655 0.579 1.159 2.298 4.516
A100-80G Llama-3-8B 4 0.115 0.145 0.239 0.381 0.6635 1.182 2.46
A100-80G Llama-3-8B 8 0.076 0.108 0.14 0.209 0.355 0.679 1.404
A100-80G CodeLlama-34B 1 0.966 1.083 1.803 3.38 6.96 12.87 24.96
A100-80G CodeLlama-34B 2 0.5035 0.58 0.9015 1.764 3.579 6.534 12.98
A100-80G CodeLlama-34B 4 0.276 0.334 0.5215 0.949 1.909 3.49 6.638
A100-80G CodeLlama-34B 8 0.168 0.206 0.316 0.534 0.9815 1.958 3.653
A100-80G InternLM-20B 1 0.4705 0.627 0.797 1.673 3.281 5.993 11.55
A100-80G InternLM-20B 2 0.255 0.303 0.5275 0.8315 1.618 3.047 5.976
A100-80G InternLM-20B 4 0.154 0.189 0.26 0.42 0.805 1.645 3.242
A100-80G InternLM-20B 8 0.102 0.123 0.179 0.261 0.4725 0.8785 1.782
H100-80G Llama-2-7B 1 0.185 0.201 0.289 0.3785 0.664 1.278 2.631
H100-80G Llama-2-7B 2 0.1115 0.119 0.1445 0.2255 0.38 0.71 1.407
H100-80G Llama-2-7B 4 0.073 0.0795 0.096 0.139 0.2435 0.4318 0.8203
H100-80G Llama-2-7B 8 0.054 0.06 0.0715 0.1 0.158 0.2875 0.5508
H100-80G Llama-2-70B 1 0.6355 0.651 0.768 1.263 2.949 5.364 11
H100-80G Llama-2-70B 2 0.338 0.354 0.4115 0.716 1.454 2.769 5.525
H100-80G Llama-2-70B 4 0.193 0.202 0.244 0.382 0.79 1.432 2.841
H100-80G Llama-2-70B 8 0.114 0.128 0.148 0.228 0.422 0.8257 1.592
H100-80G Qwen-72B 1 0.667 0.686 0.802 1.309 2.99 5.526 11.32
H100-80G Qwen-72B 2 0.347 0.365 0.4275 0.743 1.478 2.828 5.587
H100-80G Qwen-72B 4 0.192 0.202 0.2545 0.393 0.7705 1.532 2.877
H100-80G Qwen-72B 8 0.116 0.124 0.157 0.2505 0.453 0.824 1.587
H100-80G CodeLlama-34B 1 0.5245 0.554 0.64 1.12 2.386 4.396 8.783
H100-80G CodeLlama-34B 2 0.291 0.3035 0.379 0.617 1.206 2.225 4.487
H100-80G CodeLlama-34B 4 0.1605 0.174 0.2125 0.36 0.643 1.192 2.403
H100-80G CodeLlama-34B 8 0.1005 0.112 0.1385 0.215 0.373 0.7198 1.373
H100-80G InternLM-20B 1 0.26 0.2805 0.359 0.5515 1.008 2.055 4.092
H100-80G InternLM-20B 2 0.152 0.1585 0.1945 0.327 0.5565 1.114 2.126
H100-80G InternLM-20B 4 0.092 0.104 0.122 0.1825 0.356 0.631 1.183
H100-80G InternLM-20B 8 0.0665 0.071 0.0915 0.1275 0.206 0.376 0.7345
"""  # GPU, model, tensor parallel, ms of one layer at each of _TOKENS
_SIZES = (1_277_952, 2_523_136, 5_013_504, 9_994_240, 20_054_016, 39_976_960, 56_492_032)
_ALL_REDUCES_MS = """
A100-80G 2 0.047 0.056 0.07 0.1 0.164 0.286 0.368
A100-80G 4 0.052 0.06 0.093 0.136 0.218 0.385 0.512
A100-80G 8 0.06 0.074 0.106 0.176 0.316 0.45 0.607
H100-80G 2 0.024 0.043 0.042 0.05 0.087 0.157 0.21
H100-80G 4 0.032 0.039 0.055 0.068 0.107 0.198 0.271
H100-80G 8 0.033 0.045 0.056 0.088 0.132 0.227 0.302
"""  # GPU, ranks, ms at each of _SIZES (bytes)
_NOISY = {("H100-80G", 2, 1_277_952), ("H100-80G", 2, 2_523_136)}  # the larger is reported to take 1.8 x the smaller


def _spec(model: str, gpu: Gpu, ranks: int) -> ModelSpec:
    hidden, heads, kv_heads, intermediate = _SHAPES[model]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    return spec_of_config(model, config, gpu).model_copy(update={"gpus_per_instance": ranks})


def _roofline(model: str, gpu: Gpu, ranks: int) -> SimRoofline:
    return SimRoofline(_spec(model, gpu, ranks), Cluster(gpu=gpu, gpu_count=8, gpus_per_host=8), timings())


@pytest.mark.parametrize("row", _LAYERS_MS.split("\n")[1:-1])
def test_a_layer_takes_the_measured_time(row: str) -> None:
    """The tolerance is 16 %, or 20 % where eight GPUs share a layer. Our all-reduces are excluded, since the table does
    not include any.
    """
    name, model, ranks, *measured_ms = row.split()
    gpu, rank_count = find_gpu(name, "test"), int(ranks)
    alone = gpu.model_copy(update={"collective_latency_s": 0.0, "scale_up_bytes_per_s": 1e30})
    costs = _roofline(model, alone, rank_count).costs
    for tokens, one_ms in zip(_TOKENS, measured_ms, strict=True):
        within = 0.20 if rank_count == 8 else 0.16
        assert 1e3 * costs.dense_work_s(tokens) == pytest.approx(float(one_ms), rel=within), tokens


@pytest.mark.parametrize("row", _ALL_REDUCES_MS.split("\n")[1:-1])
def test_an_all_reduce_takes_the_measured_time(row: str) -> None:
    """Each layer of a model with a hidden size of 8,192 has two all-reduces, of 1 MB for 64 tokens."""
    name, ranks, *measured_ms = row.split()
    gpu = find_gpu(name, "test")
    together, alone = (_roofline("Qwen-72B", gpu, count).costs for count in (int(ranks), 1))
    for size, one_ms in zip(_SIZES, measured_ms, strict=True):
        tokens = size / (2 * 8192)
        took_s = (together.fixed_s - alone.fixed_s + tokens * (together.row_s - alone.row_s)) / 2
        within = 0.30 if (name, int(ranks), size) in _NOISY else 0.16
        assert 1e3 * took_s == pytest.approx(float(one_ms), rel=within), size
