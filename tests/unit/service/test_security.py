"""Which callers may make which calls, and when a service refuses to listen."""

from pathlib import Path

import pytest

from ballast.common.errors import ConfigError, PermissionDenied
from ballast.rpc.callers import ANYBODY, Caller, set_caller
from ballast.rpc.tls import TlsFolder
from ballast.service.security import (
    INFERS,
    MAY_CALL,
    Role,
    Security,
    ServiceSettings,
    read_secret,
    require_worker,
)
from ballast.service.state import StateServer, state_server
from ballastpb.inference.v1 import inference_pb2
from ballastpb.monitor.v1 import monitor_pb2
from ballastpb.planner.v1 import planner_pb2
from ballastpb.worker.v1 import worker_pb2
from tools.local.certificates import make_certificates


class Settings(ServiceSettings):
    service = "worker"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder, days=1, hosts=["localhost"], workers=["w-7"])
    return folder


def test_every_call_between_services_has_its_allowed_callers() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for module in (monitor_pb2, planner_pb2, worker_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(MAY_CALL) == methods
    assert all(MAY_CALL.values())


def test_tokens_for_inference_are_valid_for_existing_methods() -> None:
    (service,) = inference_pb2.DESCRIPTOR.services_by_name.values()
    assert {f"/{service.full_name}/{method.name}" for method in service.methods} > INFERS


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_on_the_loopback_no_protection_is_needed(host: str) -> None:
    Security(Role.WORKER, Settings()).ensure_guarded([host, None], tokens=False, links=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.7", "worker-3"])
def test_on_other_addresses_a_service_needs_protection_or_an_explicit_opt_out(host: str, certificates: Path) -> None:
    bare = Security(Role.WORKER, Settings())
    with pytest.raises(ConfigError, match=r"worker.host.*needs --tls-dir and --cluster-secret-file .*--insecure"):
        bare.ensure_guarded([host], links=True)
    with pytest.raises(ConfigError, match="needs --tls-dir and --tokens-file"):
        bare.ensure_guarded(["127.0.0.1", host], tokens=False)
    Security(Role.WORKER, Settings(insecure=True)).ensure_guarded([host], tokens=False, links=True)
    secret = certificates / "cluster.secret"
    whole = Security(Role.WORKER, Settings(tls_dir=certificates / "worker", cluster_secret_file=secret))
    whole.ensure_guarded([host], links=True)
    with pytest.raises(ConfigError, match="needs --tokens-file"):
        whole.ensure_guarded([host], tokens=False)


def test_files_that_cannot_be_used_are_named(tmp_path: Path, certificates: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls.crt: cannot be read: No such file"):
        TlsFolder(tmp_path)
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_bytes((certificates / "worker" / name).read_bytes())
    TlsFolder(tmp_path)
    (tmp_path / "tls.key").write_text("nothing")
    with pytest.raises(ConfigError, match=r"tls.key: holds no PEM block"):
        TlsFolder(tmp_path)
    (tmp_path / "short").write_text("abc")
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        read_secret(tmp_path / "short")
    with pytest.raises(ConfigError, match="rediss://"):
        state_server(Settings(redis_ca_file=tmp_path / "ca.crt"))
    assert isinstance(state_server(Settings(redis_user="ballast")), StateServer)


def test_a_workers_certificate_is_valid_for_its_own_id_and_its_copies() -> None:
    try:
        for name, good in (("worker/w-7", ["w-7", "w-7.0"]), ("worker/*", ["w-7", "w-8"]), ("", ["w-7", "x"])):
            set_caller(Caller(name, operates=False))
            for worker_id in good:
                require_worker(worker_id)
        set_caller(Caller("worker/w-7", operates=False))
        for other in ("w-8", "w-71", "", "*", "w-7x"):
            with pytest.raises(PermissionDenied, match="worker/w-7"):
                require_worker(other)
    finally:
        set_caller(ANYBODY)


def test_certificates_are_made_once_and_renewed_by_the_same_ca(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, days=1, hosts=["localhost", "::1"], workers=[])
    assert {path.name for path in made} == set(Role)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in before if path.suffix in (".key", ".secret"))
    assert make_certificates(tmp_path, days=1, hosts=["localhost"], workers=["w-7"]) == [tmp_path / "w-7"]
    assert all(path.read_bytes() == data for path, data in before.items())
    assert len(make_certificates(tmp_path, days=1, hosts=[], workers=[], renew=True)) == len(Role)
    assert (tmp_path / "ca.crt").read_bytes() == before[tmp_path / "ca.crt"]
    assert (tmp_path / "cluster.secret").read_bytes() == before[tmp_path / "cluster.secret"]
    assert (tmp_path / "worker" / "tls.crt").read_bytes() != before[tmp_path / "worker" / "tls.crt"]
    with pytest.raises(ConfigError, match="cannot be the name of a folder"):
        make_certificates(tmp_path, days=1, hosts=[], workers=["../x"])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca.key: is missing"):
        make_certificates(tmp_path, days=1, hosts=[], workers=[])
