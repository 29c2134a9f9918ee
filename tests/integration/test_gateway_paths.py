"""Paths of other servers' APIs, which are served or refused with OpenAI's error object."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.support.cluster import RunningCluster


def asked(running: RunningCluster, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    url = running.cluster.http_urls[0].removesuffix("/v1") + path
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_health_paths_of_other_servers(with_a_gateway: RunningCluster) -> None:
    assert asked(with_a_gateway, "GET", "/ping") == (200, {"status": "ok"})
    assert asked(with_a_gateway, "POST", "/ping", b"") == (200, {"status": "ok"})
    assert asked(with_a_gateway, "GET", "/load") == (200, {"server_load": 0})
    assert asked(with_a_gateway, "GET", "/version")[1].keys() == {"version"}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/rerank", "/score", "/v1/audio/transcriptions"])
def test_other_kinds_of_models_are_refused_by_name(with_a_gateway: RunningCluster, path: str) -> None:
    status, said = asked(with_a_gateway, "POST", path, b'{"input": "x"}')
    assert (status, said["error"]["code"], said["error"]["type"]) == (
        404,
        "unsupported_endpoint",
        "invalid_request_error",
    )
    assert said["error"]["message"].startswith(f"{path}: this server generates text")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_without_a_jobs_service_its_paths_name_the_flag(with_a_gateway: RunningCluster, method: str) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/batches/x/cancel"):
        status, said = asked(with_a_gateway, method, path, b"x" * 100_000 if method == "POST" else None)
        assert (status, said["error"]["code"]) == (404, "unknown_url")
        assert "--jobs" in said["error"]["message"]


def test_a_model_named_like_a_route_is_unknown(with_a_gateway: RunningCluster) -> None:
    status, said = asked(with_a_gateway, "GET", "/v1/models/%7Bname:path%7D")
    assert (status, said["error"]["code"]) == (404, "model_not_found")
