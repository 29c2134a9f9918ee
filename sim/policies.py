"""Overload policies by name. Each is a change to the production rules."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from ballast.common.errors import ConfigError
from ballast.common.overload import OverloadPolicy
from sim.rules import ClusterRules, WorkerRules

Policy = Callable[[ClusterRules], ClusterRules]

# InferCept keeps everything in host memory; hosts of such GPUs have far more memory per instance than this.
DEFAULT_SWAP_BYTES = 64 << 30


def _with(rules: ClusterRules, policy: OverloadPolicy) -> ClusterRules:
    transitions = replace(rules.planner.transitions, policy=policy)
    return replace(rules, planner=replace(rules.planner, transitions=transitions))


def _swapping(rules: WorkerRules) -> WorkerRules:
    return replace(rules, swap_space_bytes=rules.swap_space_bytes or DEFAULT_SWAP_BYTES)


POLICIES: Mapping[str, Policy] = {
    "drop": lambda rules: replace(
        _with(rules, OverloadPolicy.DROP), migrations=replace(rules.migrations, relieves=True)
    ),
    "swap": lambda rules: _with(replace(rules, worker=_swapping(rules.worker)), OverloadPolicy.SWAP),
    "migrate": lambda rules: replace(
        _with(rules, OverloadPolicy.MIGRATE), migrations=replace(rules.migrations, balances=True)
    ),
    "recompute": lambda rules: _with(rules, OverloadPolicy.RECOMPUTE),
    "static-pipeline": lambda rules: _with(rules, OverloadPolicy.STATIC_PIPELINE),
}


def find_policy(name: str) -> Policy:
    """Find a policy.

    Raises:
        ConfigError: it is unknown; the message lists the known ones.
    """
    found = POLICIES.get(name)
    if found is None:
        raise ConfigError("policy", f"{name!r}; known are {', '.join(POLICIES)}")
    return found
