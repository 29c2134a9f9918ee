"""Exposition of a registry: our samples carry the model's name, and appear under vLLM's names, too."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from ballast.service.metrics import VLLM_NAMES, Exposition


def shown(exposition: Exposition) -> set[str]:
    registry = CollectorRegistry()
    registry.register(exposition)
    return set(generate_latest(registry).decode().splitlines())


def registry_with_samples() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("ballast_requests_running", "Requests that run", registry=registry).set(3)
    endings = Counter("ballast_requests_total", "Requests by how they ended", ["ending"], registry=registry)
    endings.labels("stop").inc(5)
    endings.labels("cancelled").inc(2)
    endings.labels("refused").inc(7)
    Histogram("ballast_request_ttft_seconds", "TTFT", buckets=(1.0,), registry=registry).observe(0.5)
    ProcessCollector(registry=registry)
    return registry


def test_the_model_name_is_a_label_as_soon_as_it_is_known() -> None:
    exposition = Exposition(registry_with_samples(), "d-0")
    assert "ballast_requests_running 3.0" in shown(exposition)
    exposition.model_name = lambda: "Qwen"
    lines = shown(exposition)
    assert 'ballast_requests_running{model_name="Qwen"} 3.0' in lines
    assert 'ballast_requests_total{ending="stop",model_name="Qwen"} 5.0' in lines
    assert 'ballast_request_ttft_seconds_bucket{le="1.0",model_name="Qwen"} 1.0' in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines), (
        "other libraries' metrics stay as they are"
    )
    assert not any("_created" in line for line in lines)


def test_the_core_metrics_appear_under_the_names_of_vllm_too() -> None:
    exposition = Exposition(registry_with_samples(), "d-0")
    exposition.model_name = lambda: "Qwen"
    lines = shown(exposition)
    assert 'vllm:num_requests_running{engine="d-0",model_name="Qwen"} 3.0' in lines
    assert 'vllm:time_to_first_token_seconds_count{engine="d-0",model_name="Qwen"} 1.0' in lines
    assert 'vllm:request_success_total{engine="d-0",finished_reason="stop",model_name="Qwen"} 5.0' in lines
    assert 'vllm:request_success_total{engine="d-0",finished_reason="abort",model_name="Qwen"} 2.0' in lines
    assert not any("refused" in line for line in lines if line.startswith("vllm"))
    assert 'ballast_requests_running{model_name="Qwen"} 3.0' in lines
    assert all(name.startswith("vllm:") for names in VLLM_NAMES.values() for name in names)
