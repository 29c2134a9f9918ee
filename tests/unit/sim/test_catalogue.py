"""The catalogue is complete, and figures computed from it match those printed in the papers."""

from itertools import pairwise

import pytest

from ballast.common.cost import Chunk
from ballast.common.errors import ConfigError
from services.worker.core.batch import Batch, Slice
from sim.clock import Clock
from sim.cost import SimRoofline, fitted
from sim.hardware import ELEMENT_BYTES, find_cluster, find_model, gpus, models, timings
from sim.network import Bulk, Network, NetworkEndpoint


def batch(*shares: tuple[int, int]) -> Batch:
    """A batch from (tokens with KV, tokens to compute) of each sequence; all of them emit a token."""
    slices = [Slice(number, prefix, (0,) * count, True) for number, (prefix, count) in enumerate(shares)]
    return Batch(1, (), (), tuple(slices))


def roofline(model: str, cluster: str) -> SimRoofline:
    return SimRoofline(find_model(model), find_cluster(cluster), timings())


def test_every_figure_has_a_source() -> None:
    assert {"A800-80G", "A100-40G", "H100-80G", "H200", "B200", "L4", "L40S", "A10G", "MI300X"} <= set(gpus())
    assert {"Llama-3.1-8B", "Qwen3-8B", "Qwen3-32B", "Mistral-7B", "Qwen2.5-14B"} <= set(models())
    for entry in (*gpus().values(), *models().values()):
        assert len(entry.source) > 20


@pytest.mark.parametrize(
    ("name", "gib", "ratio"),  # from KunServe, EuroSys '26, table 1
    [
        ("Qwen2.5-14B", 28, 0.344),
        ("Qwen2.5-72B", 136, 0.423),
        ("Llama-3.1-405B", 756, 0.591),
        ("Qwen3-235B", 479, 0.748),
        ("DeepSeek-V3", 1572, 0.614),
    ],
)
def test_sizes_are_those_of_the_paper(name: str, gib: float, ratio: float) -> None:
    model = find_model(name)
    assert model.parameter_bytes / 2**30 == pytest.approx(gib, rel=0.02)
    assert model.parameter_bytes / 2**30 / (80 * model.gpus_per_instance) == pytest.approx(ratio, abs=0.005)


def test_a_token_of_qwen_14b_takes_192_kib() -> None:
    assert find_model("Qwen2.5-14B").kv_bytes_per_token == 192 * 1024


def test_a_decode_with_full_memory_takes_60_ms() -> None:
    """KunServe, EuroSys '26, section 5.3; timings.yaml states what a decode is assumed to take."""
    cost = roofline("Qwen2.5-14B", "8xA800")
    decode = batch(*((243_000 // 64, 1) for _ in range(64)))
    assert cost.work(decode).on(48, is_last=True) == pytest.approx(0.060, rel=0.05)


def test_an_exchange_of_33_gb_takes_1_3_s() -> None:
    """KunServe, first arXiv version, section 4.2: between two GPUs, at 200 Gbps."""
    clock, gpu = Clock(), find_cluster("8xA800").gpu
    network = Network(clock, latency_s=0.0, chunk_bytes=1.0, rate_fraction=timings().link_fraction)
    for host, name in enumerate("ab"):
        network.add(NetworkEndpoint(name, host, gpu.nic_bytes_per_s, gpu.scale_up_bytes_per_s))
    for source, to in ("ab", "ba"):
        network.transfer(source, to, 16_500_000_000, Bulk.KV, lambda: None)
    while clock.step():
        pass
    assert clock.now_s == pytest.approx(1.3, rel=0.03)


def test_a_batch_costs_at_least_reading_the_parameters_and_grows_with_everything() -> None:
    cost = roofline("Qwen2.5-14B", "8xA800")
    one = cost.work(batch((0, 1))).on(48, is_last=True)
    read_s = find_model("Qwen2.5-14B").parameter_count * ELEMENT_BYTES / 2.039e12
    assert one > read_s
    costs = [
        cost.work(batch(*shares)).on(48, is_last=True)
        for shares in ([(0, 1)], [(100, 1)], [(100, 1), (100, 1)], [(0, 512)], [(0, 1024)], [(4096, 1024)])
    ]
    assert all(less < more for less, more in pairwise(costs))


def test_two_stages_take_the_time_of_one_plus_overhead() -> None:
    work = roofline("Qwen2.5-14B", "8xA800").work(batch((0, 700), (900, 1)))
    halves = work.on(20, is_last=False) + work.on(28, is_last=True)
    assert halves == pytest.approx(work.on(48, is_last=True) + work.stage_s)


def test_experts_are_read_as_far_as_they_are_used() -> None:
    cost = roofline("DeepSeek-V3", "4x8xH800")
    few, many = (cost.work(batch(*((10, 1) for _ in range(count)))).layer_s for count in (1, 256))
    assert many > 4 * few


def test_the_fitted_model_meets_the_machine_within_a_third() -> None:
    """Linear terms cannot express the maximum of two times, but they are accurate enough for balancing stages."""
    machine = roofline("Qwen2.5-14B", "8xA800")
    cost = fitted(machine, 48)
    for shares in ([(0, 1024)], [(3000, 2048)], [(2000, 1)] * 64, [(1000, 400), *[(2000, 1)] * 32]):
        took_s = machine.work(batch(*shares)).on(48, is_last=True)
        assert cost.batch_cost_s([Chunk(*share) for share in shares]) == pytest.approx(took_s, rel=0.35)


@pytest.mark.parametrize("name", ["qwen2.5-14b", "Qwen-2.5-14B", "QWEN2.5 14B", "14b"])
def test_model_names_may_be_spelt_in_several_ways(name: str) -> None:
    assert find_model(name).name == "Qwen2.5-14B"


@pytest.mark.parametrize(
    ("text", "gpu", "count", "per_host"),
    [
        ("8xA800", "A800-80G", 8, 1),
        ("2x8xH800", "H800", 16, 8),
        ("4xA100-40G", "A100-40G", 4, 8),
        ("8x4090", "RTX-4090", 8, 8),
        ("3xRTX-4090", "RTX-4090", 3, 8),
    ],
)
def test_clusters_are_read(text: str, gpu: str, count: int, per_host: int) -> None:
    cluster = find_cluster(text)
    assert (cluster.gpu.name, cluster.gpu_count, cluster.gpus_per_host) == (gpu, count, per_host)


def test_a_cluster_may_have_gpus_of_several_kinds() -> None:
    cluster = find_cluster("4xA100-40G+2x2xH100-80G")
    assert [(kind.gpu.name, kind.gpu_count, kind.gpus_per_host) for kind in cluster.kinds] == [
        ("A100-40G", 4, 8),
        ("H100-80G", 4, 2),
    ]
    assert cluster.gpu_name == "A100-40G + H100-80G"
    with pytest.raises(ConfigError, match=r"^cluster.*one kind, got A100-40G \+ H100-80G"):
        cluster.require_one_kind("a sweep")


@pytest.mark.parametrize("text", ["8xA800+", "A800", "8", "8xB300", "0xA800", "8xA100", ""])
def test_invalid_clusters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster"):
        find_cluster(text)


def test_an_unknown_model_names_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'gpt-5' is not known; known are DeepSeek-V3, Llama-2-13B"):
        find_model("gpt-5")
