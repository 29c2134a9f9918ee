"""The dashboard's answers to requests that no page sends."""

import httpx2 as httpx
import pytest

from tools.dashboard.app import Dashboard, build_app
from tools.dashboard.watched import Watched


@pytest.mark.parametrize("cluster", ["1", "-1", "x", "9" * 5000, "²"])
async def test_an_unknown_cluster_is_named(cluster: str) -> None:
    watched = Watched("127.0.0.1:1")
    transport = httpx.ASGITransport(build_app(Dashboard([watched]), hosts=["*"]))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        params, headers = {"cluster": cluster}, {"x-ballast-dashboard": "1"}
        answer = await http.post("/api/drop", params=params, headers=headers)
    assert (answer.status_code, answer.json()["message"]) == (404, f"no cluster {cluster[:32]}")
    await watched.close()
