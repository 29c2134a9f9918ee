"""The dispatcher's Prometheus metrics after a scripted story of its core."""

from prometheus_client import CollectorRegistry, generate_latest

from services.dispatcher.core.events import Ending, Finish
from services.dispatcher.shell.metrics import DispatcherMetrics
from tests.support.dispatcher_core import Story, load


def test_gauges_totals_and_histograms_match_the_story() -> None:
    story = Story("a", "b")
    registry = CollectorRegistry()
    metrics = DispatcherMetrics(story.core, registry)
    story.submit("done")
    story.now_s = 0.5
    story.step("a", {"done": [1]})
    story.now_s = 0.86
    story.step("a", {"done": [2, 3, 4]})
    [finish] = story.finish("a", "done").of(Finish)
    metrics.observe(finish.facts)
    story.submit("runs")
    full = load(used_block_count=64, running_count=8, waiting_count=2)
    story.step("a", report=full)
    story.step("b", report=full)
    story.submit("waits", prompt=5)
    story.raw_step("b", {99: [1]}, report=full)
    story.step("a", endings=[Ending(story.handle_of("runs"), None, moved_to="b")], report=full)
    lines = set(generate_latest(registry).decode().splitlines())
    expected = {
        "ballast_backlog_requests 1.0",
        "ballast_backlog_tokens 5.0",
        "ballast_placed_requests 1.0",
        "ballast_replays_total 0.0",
        'ballast_moves_total{how="at_once"} 1.0',
        "ballast_stale_messages_total 1.0",
        'ballast_requests_total{ending="length"} 1.0',
        'ballast_worker_connected{worker="a"} 1.0',
        'ballast_worker_placed_requests{worker="b"} 1.0',
        'ballast_worker_running_requests{worker="b"} 8.0',
        'ballast_worker_kv_usage_fraction{worker="b"} 1.0',
        "ballast_request_ttft_seconds_sum 0.5",
        "ballast_request_e2e_seconds_sum 0.86",
        'ballast_request_tpot_seconds_bucket{le="0.1"} 0.0',
        'ballast_request_tpot_seconds_bucket{le="0.15"} 1.0',
        'ballast_inter_token_seconds_bucket{le="0.3"} 0.0',
        'ballast_inter_token_seconds_bucket{le="0.4"} 1.0',
        "ballast_inter_token_seconds_sum 0.36",
    }
    assert expected <= lines, expected - lines
