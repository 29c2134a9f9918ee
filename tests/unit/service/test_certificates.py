"""Renewed certificates are reloaded, and their remaining validity is reported."""

import asyncio
import os
import ssl
from pathlib import Path

import pytest
from starlette.applications import Starlette

from ballast.common.errors import ConfigError
from ballast.rpc.tls import TlsFolder, expires_unix_s
from ballast.service.http_server import HttpServer
from ballast.service.metrics import REGISTRY
from ballast.service.security import GuardedSettings, Role, Security
from tools.cli import checks
from tools.cli.checks import Verdict
from tools.local.certificates import make_certificates

_DAY_S = 86400.0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_certificates(tmp_path, days=10, hosts=["127.0.0.1"], workers=[])
    return tmp_path


async def served_until(port: int, ca: Path) -> float:
    """Unix time at which the certificate served to a new connection expires."""
    context = ssl.create_default_context(cafile=str(ca))
    context.check_hostname = False
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    return float(ssl.cert_time_to_seconds(certificate["notAfter"]))


async def test_an_http_server_uses_a_renewed_certificate(keys: Path) -> None:
    folder = keys / "gateway"
    server = HttpServer(
        Starlette(), host="127.0.0.1", port=0, shutdown_timeout_s=1.0, client_stall_timeout_s=1.0, tls_dir=folder
    )
    await server.start()
    stopping = asyncio.Event()
    serving = asyncio.create_task(server.serve(stopping))
    try:
        before = await served_until(server.port, keys / "ca.crt")
        (folder / "tls.key").write_text("half written")
        await asyncio.sleep(1.5)
        assert await served_until(server.port, keys / "ca.crt") == before
        make_certificates(keys, days=90, hosts=["127.0.0.1"], workers=[], renew=True)
        after = before
        for _ in range(50):
            if (after := await served_until(server.port, keys / "ca.crt")) != before:
                break
            await asyncio.sleep(0.2)
        assert after > before + 50 * _DAY_S
    finally:
        stopping.set()
        await serving


def test_channels_use_the_files_at_their_creation(keys: Path) -> None:
    folder = TlsFolder(keys / "planner")
    first = folder.channel_credentials()
    assert folder.channel_credentials() is first
    make_certificates(keys, days=90, hosts=["127.0.0.1"], workers=[], renew=True)
    renewed = folder.channel_credentials()
    assert renewed is not first
    (keys / "planner" / "tls.key").unlink()
    assert folder.channel_credentials() is renewed, "an incomplete renewal changes nothing"


def test_remaining_validity_is_a_metric_and_a_warning(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Security(Role.PLANNER, GuardedSettings(tls_dir=keys / "planner"))
    assert "certificate ends soon" in capsys.readouterr().out
    samples = {
        sample.labels["folder"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "ballast_certificate_expires_seconds"
    }
    assert 9 * _DAY_S < samples["planner"] <= 10 * _DAY_S


def test_a_file_without_a_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tls.crt"
    file.write_text(os.linesep)
    with pytest.raises(ConfigError, match=r"tls\.crt"):
        expires_unix_s(file)


def test_doctor_shows_how_long_a_certificate_is_valid(keys: Path) -> None:
    assert checks.certificate(keys / "planner").verdict is Verdict.WARN
    make_certificates(keys, days=90, hosts=["127.0.0.1"], workers=[], renew=True)
    assert checks.certificate(keys / "planner").verdict is Verdict.OK
    assert checks.certificate(keys).verdict is Verdict.FAIL
