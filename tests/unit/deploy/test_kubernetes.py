"""The Kubernetes manifests match the schema, name existing settings, and have policies that allow the needed
connections.
"""

import copy
import math
import shutil
import subprocess
from itertools import pairwise
from typing import Any

import kubernetes_validate
import pytest
import yaml

import ballast
from ballast.service.metrics import REGISTRY
from deploy.kubernetes_check import FOLDER
from deploy.kubernetes_file import of_kind, read_kubernetes, read_manifests
from services.planner.core.sizing import SizingRules
from services.planner.metrics import PlannerMetrics
from tests.support.planner_core import Planner
from tests.unit.planner.test_sizing import CALM, COMPUTING, IDLE, away, go_on
from tests.unit.planner.test_standings import says

# Any: manifests are plain YAML.
MANIFESTS: list[dict[str, Any]] = read_manifests(FOLDER)
PODS = of_kind(MANIFESTS, "Deployment", "StatefulSet")
SETTINGS = of_kind(MANIFESTS, "ConfigMap")["ballast-settings"]["data"]
SERVICES = ("dispatcher", "gateway", "jobs", "monitor", "planner", "worker")
# Allowed connections (docs/security.md).
DOORS = {
    ("gateway", "dispatcher", 50051),
    ("worker", "dispatcher", 50051),  # the preStop hook
    ("dispatcher", "monitor", 50052),
    ("planner", "monitor", 50052),
    ("worker", "monitor", 50052),
    ("dispatcher", "planner", 50053),
    ("dispatcher", "worker", 50061),
    ("planner", "worker", 50061),
    ("gateway", "jobs", 50054),
    ("worker", "worker", 50062),
    *((one, "state", 6379) for one in SERVICES if one != "gateway"),
}


def container(name: str) -> dict[str, Any]:
    [found] = PODS[name]["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_schema_of_kubernetes(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schema_rejects_a_mistake() -> None:
    wrong = copy.deepcopy(PODS["worker"])
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["grpc"]["prt"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.30", strict=True)


def test_every_setting_exists() -> None:
    for name, spec in read_kubernetes(MANIFESTS, SETTINGS).items():
        if name == "state":
            continue
        module = __import__(f"services.{name}.config", fromlist=["config"])
        settings = getattr(module, f"{name.capitalize()}Settings")
        prefix = f"BALLAST_{name.upper()}__"
        values = {key.removeprefix(prefix).lower(): v for key, v in spec.environment.items() if key.startswith(prefix)}
        settings.model_validate(values)
        assert {key.split("__")[0] for key in SETTINGS} <= {f"BALLAST_{one.upper()}" for one in SERVICES}


def test_pods_are_probed_by_grpc_and_announce_their_addresses() -> None:
    for name in set(SERVICES) - {"gateway", "jobs"}:
        pod = container(name)
        assert all("grpc" in pod[probe] for probe in ("startupProbe", "livenessProbe", "readinessProbe")), name
        assert "service" not in pod["livenessProbe"]["grpc"], "liveness must not depend on readiness"
        told = {one["name"]: one for one in pod["env"]}
        assert told["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert told[f"BALLAST_{name.upper()}__ADVERTISE_HOST"]["value"] == "$(POD_IP)"


def test_pods_end_without_losing_running_requests() -> None:
    for name in SERVICES:
        pod = PODS[name]["spec"]["template"]["spec"]
        assert "preStop" in container(name)["lifecycle"], name
        told = {one["name"]: one.get("value") for one in container(name)["env"]}
        timeout_s = float(told.get(f"BALLAST_{name.upper()}__SHUTDOWN_TIMEOUT_S") or 30)
        assert pod["terminationGracePeriodSeconds"] > timeout_s + 20, name
        budget = of_kind(MANIFESTS, "PodDisruptionBudget")[name]["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"]["matchLabels"] == PODS[name]["spec"]["selector"]["matchLabels"]
    assert "drain" in container("worker")["lifecycle"]["preStop"]["exec"]["command"][2]


def test_all_dispatchers_share_a_dns_name() -> None:
    services = of_kind(MANIFESTS, "Service")
    assert services["dispatcher"]["spec"]["clusterIP"] == "None"
    assert {"name": "BALLAST_GATEWAY__DISPATCHERS", "value": "dispatcher:50051"} in container("gateway")["env"]
    for name, service in services.items():
        assert service["spec"]["selector"] == PODS[name]["spec"]["selector"]["matchLabels"]
        listening = {port["containerPort"] for port in container(name)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= listening


def test_only_necessary_connections_are_allowed() -> None:
    policies = of_kind(MANIFESTS, "NetworkPolicy")
    everything = policies.pop("nothing-by-default")["spec"]
    assert "ingress" not in everything
    for workload in PODS.values():
        assert everything["podSelector"]["matchLabels"].items() <= (
            workload["spec"]["template"]["metadata"]["labels"].items()
        )
    doors = set[tuple[str, str, int]]()
    open_to_all = set[tuple[str, int]]()
    for name, policy in policies.items():
        assert policy["spec"]["podSelector"]["matchLabels"] == {"app": name}
        for rule in policy["spec"]["ingress"]:
            [port] = [one["port"] for one in rule["ports"]]
            assert port in {one["containerPort"] for one in container(name)["ports"]}
            if "from" not in rule:
                open_to_all.add((name, port))
            for one in rule.get("from", ()):
                labels = one.get("podSelector", {}).get("matchLabels", {})
                if "app" in labels:
                    doors.add((labels["app"], name, port))
    assert doors == DOORS
    assert open_to_all == {("gateway", 8000)}


class Keda:
    """KEDA and its autoscaler as configured in autoscaling.yaml, which derive replica counts from a query's result."""

    def __init__(self) -> None:
        scaled = yaml.safe_load((FOLDER / "autoscaling.yaml").read_text())["spec"]
        [self.trigger] = scaled["triggers"]
        self.target, self.every_s = scaled["scaleTargetRef"], scaled["pollingInterval"]
        self.least, self.most = scaled["minReplicaCount"], scaled["maxReplicaCount"]
        self.down = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        self._desired: list[tuple[float, int]] = []
        self._down_at_s = -math.inf

    def desired(self) -> int:
        """Desired replicas from `max(METRIC)` over the planner's metrics, for metric type AverageValue."""
        metric = self.trigger["metadata"]["query"].removeprefix("max(").removesuffix(")")
        value = REGISTRY.get_sample_value(metric)
        assert value is not None
        assert self.trigger["metricType"] == "AverageValue"
        wanted = math.ceil(value / float(self.trigger["metadata"]["threshold"]))
        return min(self.most, max(self.least, wanted))

    def replicas(self, count: int, at_s: float) -> int:
        """The next replica count. It rises at once, and falls to the maximum of the window by a few pods per period."""
        self._desired.append((at_s, self.desired()))
        window_s, [policy] = self.down["stabilizationWindowSeconds"], self.down["policies"]
        recent = [wanted for since_s, wanted in self._desired if since_s >= at_s - window_s]
        if recent[-1] >= count or max(recent) >= count or at_s < window_s:
            return max(recent[-1], count)
        if at_s < self._down_at_s + policy["periodSeconds"]:
            return count
        self._down_at_s = at_s
        return max(max(recent), count - policy["value"])


@pytest.mark.rotating
def test_workers_are_scaled_to_the_planners_number() -> None:
    """At first compute is scarce, then no requests arrive. Pods are added at once, and the last pod is removed once it
    is parked.
    """
    keda, metrics = Keda(), PlannerMetrics()
    assert (PODS[keda.target["name"]]["kind"], keda.target["name"]) == (keda.target["kind"], "worker")
    assert keda.least >= 2, "a lone worker cannot drop"
    planner = Planner(sizing=SizingRules(parks=True, last_name=True, dwell_s=10.0))
    planner.load, planner.traffic = IDLE, COMPUTING
    pods = [f"worker-{number}" for number in range(keda.least)]
    planner.start(*pods)
    counts = list[int]()
    for turn in range(105):
        planner.traffic = COMPUTING if turn < 8 else CALM
        go_on(planner, keda.every_s)
        for worker in away(planner):
            says(planner, worker, parked=True)
        metrics.wanted(planner.core.conductor.sizing.wanted(planner.core.layout).wanted)
        wanted = keda.replicas(len(pods), planner.now_s)
        while len(pods) < wanted:
            pods.append(f"worker-{len(pods)}")
            planner.up(pods[-1])
        while len(pods) > wanted:
            assert pods[-1] in away(planner), "the pod that ends serves nothing"
            planner.lose(pods.pop())
        counts.append(len(pods))
    assert max(counts) > keda.least, "compute was short"
    assert counts[-1] < max(counts)
    assert max(before - after for before, after in pairwise(counts)) <= 1


def test_the_planner_parks_the_pod_that_kubernetes_removes() -> None:
    """Kubernetes removes the highest-numbered pod of a StatefulSet. If the planner parked the emptiest pod instead, a
    busy one would be removed (see `test_the_last_by_name_leaves_where_platforms_end_that_one` in test_sizing.py).
    """
    settings = read_kubernetes(MANIFESTS, SETTINGS)["planner"].environment
    assert settings["BALLAST_PLANNER__PARK_ORDER"] == "last-name"
    assert PODS["worker"]["kind"] == "StatefulSet"


def test_images_are_of_this_version() -> None:
    for name in SERVICES:
        assert container(name)["image"].endswith(f":{ballast.__version__}")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kustomize_builds_the_manifests_that_we_read() -> None:
    command = ["kubectl", "kustomize", str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    built = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert specs(built) == specs(MANIFESTS)


def specs(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"{one['kind']} {one['metadata']['name']}": one.get("spec") for one in manifests}
