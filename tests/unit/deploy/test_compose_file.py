import importlib.resources
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from ballast.common.errors import ConfigError
from ballast.service.security import is_loopback
from deploy.compose_file import COMPLETED, HEALTHY, Placement, ServiceSpec, read_compose, start_order
from services.planner.config import PlannerSettings
from services.worker.config import WorkerSettings

ROOT = Path(__file__).resolve().parents[3]
OURS = read_compose(ROOT / "docker-compose.yml", {})
SCHEMA = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
SCALABLE = ("dispatcher", "worker", "monitor", "planner")


def written(folder: Path, text: str) -> Path:
    path = folder / "compose.yml"
    path.write_text(text)
    return path


def test_scalable_services_have_no_fixed_name_or_port() -> None:
    for name in SCALABLE:
        spec = OURS[name]
        assert "container_name" not in spec.raw
        assert "hostname" not in spec.raw
        assert spec.published == ()  # replicas cannot share a published port


def test_one_port_is_published_and_to_this_machine_only() -> None:
    everything = read_compose(ROOT / "docker-compose.yml", {}, ("emulated",))
    assert {name: spec.published for name, spec in everything.items() if spec.published} == {
        "gateway": ("127.0.0.1:8000:8000",)
    }


def test_no_service_refuses_the_host_on_which_it_listens() -> None:
    everything = read_compose(ROOT / "docker-compose.yml", {}, ("emulated",))
    listening = 0
    for name, spec in everything.items():
        for key, host in spec.environment.items():
            prefix, _, setting = key.rpartition("__")
            if setting == "HOST" and not is_loopback(host):
                guard = spec.environment.get(f"{prefix}__INSECURE"), spec.environment.get(f"{prefix}__TLS_DIR")
                assert guard[0] == "true" or guard[1], f"{name} exits at once: see Security.ensure_guarded"
                listening += 1
    assert listening >= 7


def test_cpu_memory_logs_and_restarts_are_limited() -> None:
    for name, spec in read_compose(ROOT / "docker-compose.yml", {}, ("emulated",)).items():
        assert float(spec.raw["cpus"]) > 0, name
        assert spec.raw["mem_limit"].endswith("g"), name
        assert spec.raw["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert spec.raw["restart"] == ("no" if name in ("keys", "model", "machine") else "on-failure:5"), name


def test_images_install_requirements_before_they_copy_sources() -> None:
    stages = re.split(r"^FROM ", (ROOT / "deploy/docker/Dockerfile").read_text(), flags=re.MULTILINE)
    installing = [stage for stage in stages if "--require-hashes" in stage]
    assert len(installing) == 2
    assert all("COPY --from=sources" not in stage for stage in installing)
    assert all("--no-deps" in stage for stage in stages if "COPY --from=sources" in stage)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", "".join(stages), re.MULTILINE)
    assert {name.split("/")[0] for names in copied for name in names.split()} <= {name.split("/")[0] for name in kept}


def test_every_long_running_service_has_a_health_check() -> None:
    assert {name for name, spec in OURS.items() if spec.health_command is None} == {"keys", "model"}
    for spec in OURS.values():
        for other, condition in spec.depends_on.items():
            assert condition == (COMPLETED if other in ("keys", "model") else HEALTHY)


def test_the_profile_with_boards_mounts_existing_files_and_is_not_started_by_default() -> None:
    content = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    watching = {name: raw for name, raw in content.items() if raw.get("profiles") == ["observability"]}
    assert set(watching) == {"prometheus", "grafana"}
    assert not set(watching) & set(OURS)
    for raw in watching.values():
        files = [volume.split(":")[0] for volume in raw["volumes"] if volume.startswith(".")]
        assert files
        assert all((ROOT / file).is_file() for file in files)
        assert all(port.startswith("127.0.0.1:") for port in raw["ports"])
    scraped = yaml.safe_load((ROOT / "deploy/observability/prometheus.yml").read_text())["scrape_configs"]
    names = {name for job in scraped for where in job["dns_sd_configs"] for name in where["names"]}
    assert names <= {*content, "gateway"}


def test_every_build_target_of_ours_exists() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    targets = {spec.raw["build"]["target"] for spec in OURS.values() if "build" in spec.raw}
    assert targets == {"control", "worker"}
    assert targets <= set(stages)


class Overlay(yaml.SafeLoader):
    """Loads a Compose override file; a value tagged `!reset` is read as None."""


Overlay.add_constructor("!reset", lambda loader, node: None)


def test_compose_accepts_our_files() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for name in ("docker-compose.yml", "deploy/compose.scale.yml", "deploy/compose.gpu.yml"):
        content = yaml.load((ROOT / name).read_text(), Overlay)
        assert [error.message for error in validator.iter_errors(content)] == []
    content["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"][0].pop("capabilities")
    assert "'capabilities' is a required property" in [error.message for error in validator.iter_errors(content)]


def test_workers_on_gpus_claim_one_each_and_take_a_share_of_its_memory(tmp_path: Path) -> None:
    [(name, over)] = yaml.load((ROOT / "deploy/compose.gpu.yml").read_text(), Overlay)["services"].items()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    assert (name, over["build"]["target"] in stages) == ("worker", True)
    [reserved] = over["deploy"]["resources"]["reservations"]["devices"]
    # All GPUs: with a number, every replica would get the same first GPUs.
    assert (reserved["driver"], reserved["count"]) == ("nvidia", "${BALLAST_GPUS:-all}")
    assert "gpu" in reserved["capabilities"]
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][name]
    merged = {k: v for k, v in {**base["environment"], **over["environment"]}.items() if v is not None}
    path = written(tmp_path, yaml.safe_dump({"services": {name: base | {"environment": merged}}}))
    filled = read_compose(path, {})[name].environment
    values = {key.removeprefix("BALLAST_WORKER__").lower(): v for key, v in filled.items() if not key.startswith("HF_")}
    settings = WorkerSettings.model_validate(values)
    assert (settings.device, settings.gpu_memory_utilization) == ("cuda:auto", 0.9)
    assert "device_memory_bytes" not in settings.model_fields_set


def test_the_planners_webhook_matches_ballast_scale() -> None:
    over = yaml.safe_load((ROOT / "deploy/compose.scale.yml").read_text())
    [(name, planner)] = over["services"].items()
    told = {key.removeprefix("BALLAST_PLANNER__").lower(): value for key, value in planner["environment"].items()}
    settings = PlannerSettings.model_validate(told)
    assert (name, settings.park_order) == ("planner", "last-name")
    assert settings.scale_webhook == "http://host.docker.internal:9100/"
    assert f"/run/secrets/{planner['secrets'][0]}" == str(settings.scale_webhook_secret_file)
    assert list(over["secrets"]) == planner["secrets"]
    assert planner["extra_hosts"] == ["host.docker.internal:host-gateway"]


def test_the_stop_grace_period_exceeds_the_drain_timeout() -> None:
    assert all(spec.raw["stop_grace_period"] == "40s" for spec in OURS.values())


@pytest.mark.parametrize("name", SCALABLE)
def test_settings_of_ours_exist(name: str) -> None:
    """A service refuses a misspelt variable at startup; this test finds it without starting the service."""
    module = __import__(f"services.{name}.config", fromlist=["config"])
    settings = getattr(module, f"{name.capitalize()}Settings")
    prefix = f"BALLAST_{name.upper()}__"
    own = {key: value for key, value in OURS[name].environment.items() if not key.startswith("HF_")}
    assert all(key.startswith(prefix) for key in own)
    values = {key.removeprefix(prefix).lower(): value for key, value in own.items()}
    assert settings.model_validate(values).port == int(values["port"])


def test_variables_are_filled_in(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
services:
  a:
    command: ["run", "${SET:-no}", "${UNSET:-default}", "$SET", "$$HOME", "${EMPTY:-fallback}"]
    environment: {NUMBER: 5}
""",
    )
    spec = read_compose(path, {"SET": "yes", "EMPTY": ""})["a"]
    assert spec.command == ("run", "yes", "default", "yes", "$HOME", "fallback")
    assert spec.environment == {"NUMBER": "5"}


def test_names_ports_and_paths_are_replaced() -> None:
    placement = Placement(
        ports={50051: 41000, 9090: 41001},
        peers={"redis:6379": "127.0.0.1:42000"},
        paths={"/model": "/tmp/x/volumes/model"},
    )
    environment = {
        "BALLAST_DISPATCHER__HOST": "0.0.0.0",
        "BALLAST_DISPATCHER__PORT": "50051",
        "BALLAST_DISPATCHER__METRICS_PORT": "9090",
        "BALLAST_DISPATCHER__REDIS_URL": "redis://redis:6379/0",
        "BALLAST_DISPATCHER__MODEL": "/model",
        "OTHER": "/modelling not-redis:6379 127.0.0.1:1",
    }
    assert list(placement.environment(environment).values()) == [
        "127.0.0.1",
        "41000",
        "41001",
        "redis://127.0.0.1:42000/0",
        "/tmp/x/volumes/model",
        "/modelling not-redis:6379 127.0.0.1:1",
    ]
    assert placement.command(("health", "127.0.0.1:50051")) == ["health", "127.0.0.1:41000"]
    assert placement.text("test -e /model/config.json") == "test -e /tmp/x/volumes/model/config.json"


def test_own_ports_come_from_environment_and_health_check() -> None:
    assert OURS["dispatcher"].own_ports == [9090, 50051]
    assert OURS["redis"].own_ports == []


def test_the_order_follows_the_dependencies() -> None:
    order = [spec.name for spec in start_order(OURS)]
    assert sorted(order) == sorted(OURS)
    for spec in OURS.values():
        assert all(order.index(other) < order.index(spec.name) for other in spec.depends_on)


def spec(name: str, *others: str) -> ServiceSpec:
    return ServiceSpec(
        name=name,
        command=("run",),
        environment={},
        volumes={},
        depends_on=dict.fromkeys(others, HEALTHY),
        health_command=None,
    )


def test_circular_and_missing_dependencies_are_refused() -> None:
    with pytest.raises(ConfigError, match="circle among a, b"):
        start_order({"a": spec("a", "b"), "b": spec("b", "a")})
    with pytest.raises(ConfigError, match="no such service: z"):
        start_order({"a": spec("a", "z")})


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("services: {a: {command: run it}}", "a.command"),
        ("services: {a: {command: []}}", "a.command"),
        ("services: [a]", "services"),
        ("nothing: 1", "services"),
        ("services: {a: {command: [x], healthcheck: {test: [CMD-SHELL, x]}}}", "a.healthcheck.test"),
        ("{", "cannot be read"),
    ],
)
def test_unsupported_keys_are_named(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(where)):
        read_compose(written(tmp_path, text), {})


def test_the_gpu_image_can_build_tritons_launchers() -> None:
    _, stage = (ROOT / "deploy/docker/Dockerfile").read_text().split("FROM worker AS worker-cuda\n")
    assert re.search(r"apt-get install .*\bgcc\b.*\blibc6-dev\b", stage)
    cache = re.findall(r"TRITON_CACHE_DIR=(\S+)", stage)
    assert f"VOLUME {cache[0]}" in stage  # not below /tmp, which compose mounts noexec
    assert stage.index("USER ballast") > stage.index("apt-get")
