"""The words of `--policies`: overload policies with their knobs, and the service flags that they stand for.

Knobs follow the policy's name after colons, so that a sweep is a list of such words: `recompute`, `drop:restore=off`,
`static-pipeline:degree=4`, `recompute:watermark=0.1:label=no thrashing`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ballast.common.errors import ConfigError
from ballast.common.overload import OverloadPolicy
from tools.local.cluster import Service

_EVERY = tuple(OverloadPolicy)
_SWAPPING = (OverloadPolicy.SWAP, OverloadPolicy.DROP)
POLICIES = ("recompute", "swap", "migrate", "static-pipeline", "drop")


# Recompute is compared with and without a watermark: which one preempts less depends on the workload.
COMPARED = ("recompute:watermark=0", "recompute", "swap", "migrate", "static-pipeline", "drop")
# KunServe, EuroSys '26, figure 14: the contribution of each step.
ABLATION = (
    "drop:microbatching=token-count:transfers=naive:label=naive drop",
    "drop:microbatching=token-count:label=+ coordinated exchange",
    "drop:label=+ lookahead",
)
# Each policy's own knobs around their defaults, so that no baseline is at a disadvantage for lack of tuning.
SWEEP = (
    "recompute",
    *(f"recompute:watermark={x}" for x in ("0", "0.2")),
    *(f"swap:swap-blocks-per-step={x}" for x in ("0", "4", "32")),
    *(f"migrate:migrate-below={x}:migrate-above={3 * x}" for x in (8, 32, 128)),
    *(f"static-pipeline:microbatching={x}" for x in ("token-count", "lookahead")),
    "drop",
)


@dataclass(frozen=True, slots=True)
class _Knob:
    service: Service
    flag: str  # flag, or dev.NAME
    of: tuple[str, ...]  # policies that have the knob
    what: str

    def words(self, value: str) -> list[str]:
        name = self.flag.removeprefix("dev.")
        return [self.flag, value] if name == self.flag else ["--dev", f"{name}={value}"]


KNOBS: dict[str, _Knob] = {
    "watermark": _Knob("worker", "dev.admission_reserve_fraction", _EVERY, "KV kept free for the growth of what runs"),
    "max-num-seqs": _Knob("worker", "--max-num-seqs", _EVERY, "requests that run at once in a worker"),
    "tpot-target-s": _Knob("worker", "--tpot-target-s", _EVERY, "seconds that a token may take: more requests wait"),
    "max-num-batched-tokens": _Knob("worker", "--max-num-batched-tokens", _EVERY, "tokens of one engine step"),
    "block-size": _Knob("worker", "--block-size", _EVERY, "tokens of a KV block"),
    "swap-space": _Knob("worker", "--swap-space-bytes", _SWAPPING, "host memory for swapped KV"),
    "swap-blocks-per-step": _Knob("worker", "dev.swap_blocks_per_step", _SWAPPING, "0: as many as hide behind a step"),
    "fallback": _Knob("worker", "--fallback-policy", ("drop",), "recompute or swap, where no drop helps"),
    "microbatching": _Knob("worker", "dev.microbatching", ("static-pipeline", "drop"), "token-count or lookahead"),
    "queue-order": _Knob("dispatcher", "--queue-order", _EVERY, "first-come, shortest-first or deadline"),
    "migrate-below": _Knob("planner", "dev.migrate_below_tokens", ("migrate",), "freeness of who gives requests away"),
    "migrate-above": _Knob("planner", "dev.migrate_above_tokens", ("migrate",), "freeness of who takes them"),
    "offline-slowdown": _Knob("worker", "--offline-slowdown", _EVERY, "of a step by offline work; 1000: unbounded"),
    "transfers": _Knob("worker", "dev.transfers", ("drop",), "coordinated, or naive: one queue for KV and activations"),
    "degree": _Knob("planner", "--pipeline-degree", ("static-pipeline",), "instances of a pipeline"),
    "ttft-target-s": _Knob("planner", "--ttft-target-s", ("drop",), "seconds until a first token is late"),
    "park": _Knob("planner", "--park", _EVERY, "on or off: whether instances that nobody needs are parked"),
    "restore": _Knob("planner", "--restore", ("drop",), "on or off: whether parameters come back"),
}


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy with its knobs, under a label that is unique in a comparison."""

    label: str
    policy: str
    knobs: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def pipeline_degree(self) -> int:
        """Instances per group when the cluster has started."""
        return int(self.knobs.get("degree", "2")) if self.policy == OverloadPolicy.STATIC_PIPELINE else 1

    def flags(self) -> dict[Service, list[str]]:
        policy = ["--overload-policy", self.policy]
        flags: dict[Service, list[str]] = {"planner": [*policy], "worker": [*policy]}
        if self.policy == OverloadPolicy.STATIC_PIPELINE and "microbatching" not in self.knobs:
            flags["worker"] += ["--dev", "microbatching=token-count"]  # as in vLLM, which this policy models
        for name, value in self.knobs.items():
            knob = KNOBS[name]
            flags.setdefault(knob.service, []).extend(knob.words(value))
        return flags


def parse_policies(text: str) -> list[PolicySpec]:
    """Parse the argument of `--policies`.

    Raises:
        ConfigError: a policy or knob is unknown, or a label occurs twice.
    """
    specs = [_parse(word.strip()) for word in text.split(",") if word.strip()]
    labels = [spec.label for spec in specs]
    if not specs:
        raise ConfigError("policies", "names none")
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError("policies", f"{label!r} occurs twice; give it a label of its own: {label}:label=...")
    return specs


def _parse(word: str) -> PolicySpec:
    policy, *settings = word.split(":")
    if policy not in POLICIES:
        raise ConfigError("policies", f"unknown: {policy!r}; there are {', '.join(POLICIES)}")
    knobs: dict[str, str] = {}
    label = ""
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not value:
            raise ConfigError("policies", f"{word!r}: knobs are NAME=VALUE, got {setting!r}")
        if name == "label":
            label = value
            continue
        if name not in KNOBS or policy not in KNOBS[name].of:
            known = ", ".join(sorted(name for name, knob in KNOBS.items() if policy in knob.of))
            raise ConfigError("policies", f"{policy} has no knob {name!r}; it has {known}")
        if name == "degree" and (not value.isdecimal() or int(value) < 2):
            raise ConfigError("policies", f"{word!r}: degree must be a whole number of at least 2")
        knobs[name] = value
    return PolicySpec(label or ":".join([policy, *(f"{k}={v}" for k, v in knobs.items())]), policy, knobs)
