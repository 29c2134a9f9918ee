"""Reads the manifests in deploy/kubernetes, and converts their workloads to the types of `compose_file`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ballast.common.errors import ConfigError
from deploy.compose_file import ServiceSpec

SETTINGS = "ballast-settings"
_WORKLOADS = ("Deployment", "StatefulSet")
# Programs that probe readiness as a kubelet does: with the gRPC health service, and over HTTP.
_GRPC = """
import sys, grpc
from grpc_health.v1 import health_pb2 as pb, health_pb2_grpc
stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(sys.argv[1]))
answer = stub.Check(pb.HealthCheckRequest(service=sys.argv[2]), timeout=5)
sys.exit(answer.status != pb.HealthCheckResponse.SERVING)
"""
_HTTP = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)"

# Any: manifests are plain YAML.
Manifest = dict[str, Any]


def read_manifests(folder: Path) -> list[Manifest]:
    """All objects that `kubectl apply -k` would apply, including generated ConfigMaps.

    Raises:
        ConfigError: a file cannot be read.
    """
    kustomization = _documents(folder / "kustomization.yaml")[0]
    found = [document for name in kustomization["resources"] for document in _documents(folder / name)]
    for generated in kustomization["configMapGenerator"]:
        data = dict(literal.split("=", 1) for literal in generated["literals"])
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generated["name"]}, "data": data})
    return found


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] in kinds}


def read_kubernetes(manifests: Sequence[Manifest], settings: Mapping[str, str]) -> dict[str, ServiceSpec]:
    """The workloads as services, by name. `settings` replace the data of the ConfigMap `ballast-settings`."""
    workloads = of_kind(manifests, *_WORKLOADS)
    return {name: _service(name, one, settings) for name, one in workloads.items()}


def pre_stop(spec: ServiceSpec) -> tuple[str, ...]:
    """The pod's preStop command; empty if it has none."""
    hook = spec.raw.get("lifecycle", {}).get("preStop", {})
    return tuple(hook["exec"]["command"]) if "exec" in hook else ()


def _documents(path: Path) -> list[Manifest]:
    try:
        return [document for document in yaml.safe_load_all(path.read_text()) if document]
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error


def _service(name: str, workload: Manifest, settings: Mapping[str, str]) -> ServiceSpec:
    pod = workload["spec"]["template"]["spec"]
    [container] = pod["containers"]
    sources = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"] if mount["name"] != "tmp"}
    if missing := [one for one in mounts.values() if one not in sources and not _claimed(workload, one)]:
        raise ConfigError(f"{name}.volumes", f"has no {', '.join(missing)}")
    environment = dict(settings) if _wants_settings(container) else {}
    environment |= {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
    return ServiceSpec(
        name=name,
        command=tuple(container["command"]),
        environment=environment,
        volumes={path: f"{name}-{volume}" if volume == "cache" else volume for path, volume in mounts.items()},
        depends_on={},  # pods do not wait for each other
        health_command=tuple(_probe(container["readinessProbe"])),
        raw=container,
    )


def _claimed(workload: Manifest, volume: str) -> bool:
    return any(claim["metadata"]["name"] == volume for claim in workload["spec"].get("volumeClaimTemplates", ()))


def _wants_settings(container: Manifest) -> bool:
    return any(one["configMapRef"]["name"] == SETTINGS for one in container.get("envFrom", ()))


def _probe(probe: Manifest) -> Iterator[str]:
    match probe:
        case {"grpc": {"port": port, **rest}}:
            yield from ("python", "-c", _GRPC, f"127.0.0.1:{port}", rest.get("service", ""))
        case {"httpGet": {"path": path, "port": port}}:
            yield from ("python", "-c", _HTTP, f"http://127.0.0.1:{port}{path}")
        case {"tcpSocket": {"port": port}}:
            yield from ("valkey-cli", "-h", "127.0.0.1", "-p", str(port), "ping")
        case _:
            raise ConfigError("readinessProbe", f"is not understood: {probe}")
