"""Generates the two Grafana dashboards: `python -m deploy.observability.boards` writes them next to this file.

Dashboards are defined in code, as lists of panels, so that a renamed metric is changed in one place. A test runs every
query against a cluster under load.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
_WIDTH, _HEIGHT = 8, 7
_COLUMNS = 24 // _WIDTH
_MODEL = 'model_name=~"$model"'


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of a dashboard. `unit` and `kind` are Grafana's names; `queries`: legend -> PromQL."""

    title: str
    unit: str
    queries: dict[str, str]
    about: str = ""
    kind: str = "timeseries"
    stacked: bool = False


def _quantiles(metric: str) -> dict[str, str]:
    """Queries for median, p90 and p99 of a histogram over all dispatchers."""
    rates = f"sum by (le) (rate({metric}_bucket{{{_MODEL}}}[$__rate_interval]))"
    return {name: f"histogram_quantile({q}, {rates})" for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


def _rate(metric: str, by: str = "", selector: str = _MODEL) -> str:
    over = f"rate({metric}{{{selector}}}[$__rate_interval])"
    return f"sum by ({by}) ({over})" if by else f"sum({over})"


def _sum(metric: str, by: str = "") -> str:
    return f"sum by ({by}) ({metric}{{{_MODEL}}})" if by else f"sum({metric}{{{_MODEL}}})"


REQUESTS: Final = (
    Panel("Time to first token", "s", _quantiles("ballast_request_ttft_seconds"), "From a request's arrival."),
    Panel(
        "Time per token", "s", _quantiles("ballast_request_tpot_seconds"), "Mean per request, after its first token."
    ),
    Panel("Time in the backlog", "s", _quantiles("ballast_request_queue_time_seconds"), "Until placed on a worker."),
    Panel(
        "Requests waiting and running",
        "short",
        {
            "backlog": _sum("ballast_backlog_requests"),
            "waiting at workers": _sum("ballast_requests_waiting"),
            "running": _sum("ballast_requests_running"),
        },
    ),
    Panel(
        "Requests ended per second", "reqps", {"{{ending}}": _rate("ballast_requests_total", "ending")}, stacked=True
    ),
    Panel(
        "Tokens per second",
        "short",
        {
            "prompt": _rate("ballast_prompt_tokens_total"),
            "generated": _rate("ballast_generation_tokens_total"),
        },
    ),
    Panel("End-to-end latency", "s", _quantiles("ballast_request_e2e_seconds")),
    Panel(
        "Longest time between two tokens",
        "s",
        _quantiles("ballast_request_longest_gap_seconds"),
        "Per request: the visible effect of a drop, a restore, a replay, or another request's long prompt.",
    ),
    Panel(
        "Replays, moves and recalls per second",
        "short",
        {
            "replayed after a loss": _rate("ballast_replays_total"),
            "moved": _rate("ballast_moves_total"),
            "recalled": _rate("ballast_recalls_total"),
        },
    ),
)

MEMORY: Final = (
    Panel(
        "KV: demand and capacity",
        "bytes",
        {
            "demand": "max(ballast_cluster_kv_demand_bytes)",
            "capacity": "max(ballast_cluster_kv_capacity_bytes)",
            "capacity with all parameters": "max(ballast_cluster_kv_undropped_bytes)",
        },
        "When demand approaches the capacity with all parameters, parameters are dropped and the capacity rises.",
    ),
    Panel(
        "Device memory of all workers",
        "bytes",
        {"{{use}}": _sum("ballast_device_memory_bytes", "use")},
        stacked=True,
    ),
    Panel(
        "KV in use, by worker",
        "percentunit",
        {"{{worker}}": "max by (worker) (ballast_worker_kv_usage_fraction)"},
        "Group leaders only, as reported to dispatchers.",
    ),
    Panel(
        "Groups by size", "short", {"{{members}} workers": "max by (members) (ballast_layout_group_size)"}, stacked=True
    ),
    Panel(
        "Drops and restores",
        "short",
        {"{{kind}} {{ending}}": "sum by (kind, ending) (ballast_transitions_total)"},
        "Since the planner started.",
    ),
    Panel(
        "Duration of a transition's phases (mean)",
        "s",
        {
            "{{kind}} {{phase}}": "sum by (kind, phase) (ballast_transition_phase_seconds_sum)"
            " / sum by (kind, phase) (ballast_transition_phase_seconds_count)"
        },
    ),
    Panel(
        "Longest stall of a request in a transition",
        "s",
        {
            "p50": "histogram_quantile(0.5, sum by (le) (ballast_transition_stall_seconds_bucket))",
            "p99": "histogram_quantile(0.99, sum by (le) (ballast_transition_stall_seconds_bucket))",
        },
        "Since the planner started.",
    ),
    Panel(
        "Instances",
        "short",
        {"alive": "max(ballast_instances)", "wanted": "max(ballast_instances_wanted)"},
        "An autoscaler can follow `wanted`: the number for sustained demand; drops absorb bursts.",
    ),
    Panel(
        "Preemptions per second",
        "short",
        {"preempted": _rate("ballast_preemptions_total")},
        "Requests that lost their KV; drops avoid preemptions.",
    ),
    Panel(
        "Busy time of pipeline stages",
        "percentunit",
        {
            "{{instance}}": f"rate(ballast_stage_busy_seconds_total{{{_MODEL}}}[$__rate_interval])",
        },
        "Fraction of the time in which a worker's stage executed a batch.",
    ),
    Panel(
        "Host memory of processes",
        "bytes",
        {"{{job}} {{instance}}": "process_resident_memory_bytes"},
        "Resident memory, in addition to the device budget.",
    ),
    Panel(
        "Problems",
        "short",
        {
            "broken invariants": "sum(ballast_invariant_violations_total)",
            "instances lost": "sum(ballast_instances_lost_total)",
            "insufficient plans": "sum(ballast_plans_insufficient_total)",
        },
        "Since the processes started; broken invariants must be 0.",
    ),
)

BOARDS: Final = {
    "requests": ("Ballast: requests", REQUESTS),
    "memory": ("Ballast: memory and drops", MEMORY),
}


# Any: Grafana's JSON.
def board(name: str) -> dict[str, Any]:
    title, panels = BOARDS[name]
    return {
        "uid": f"ballast-{name}",
        "title": title,
        "tags": ["ballast"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "model",
                    "type": "query",
                    "label": "Model",
                    "datasource": {"type": "prometheus", "uid": "${source}"},
                    "query": "label_values(ballast_backlog_requests, model_name)",
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": [_panel(index, panel) for index, panel in enumerate(panels)],
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, _COLUMNS)
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.stacked else 6, "lineWidth": 2, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    return {
        "id": index + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def queries(panels: Sequence[Panel]) -> list[str]:
    return [query for panel in panels for query in panel.queries.values()]


def text(name: str) -> str:
    """The content of a dashboard's file."""
    return json.dumps(board(name), indent=1) + "\n"


if __name__ == "__main__":
    for each in BOARDS:
        (FOLDER / "grafana" / f"{each}.json").write_text(text(each))
