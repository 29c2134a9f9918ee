"""The dashboard of a gateway that requires tokens: which tokens may change the cluster, and what the page shows for
other tokens.
"""

import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ballast.client import AsyncClient, ClusterStatus
from ballast.service.tokens import TokenRole
from tests.support.browser import Browser, browser_window, find_browser
from tests.support.cluster import RunningCluster, running_cluster, until
from tools.cli.tokens import add_token
from tools.local.certificates import make_certificates
from tools.model.tiny import make_tiny

SHOTS = os.environ.get("BALLAST_SCREENSHOTS")  # a folder for screenshots to look at
OURS = {"X-Ballast-Dashboard": "1"}
NEEDED = "this needs a token with the role operate: enter one above"

needs_browser = pytest.mark.skipif(find_browser() is None, reason="Chromium and chromedriver are not installed")


@dataclass(frozen=True)
class Guarded:
    running: RunningCluster
    folder: Path
    infer: str
    operate: str

    @property
    def page(self) -> str:
        return self.running.cluster.http_urls[0].removesuffix("/v1") + "/dashboard/"

    @property
    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.folder / "ca.crt")

    def order(self, action: str, headers: dict[str, str]) -> tuple[int, str]:
        request = urllib.request.Request(f"{self.page}api/{action}", b"", headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=30, context=self.trusting) as answer:
                return answer.status, json.load(answer)["message"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)["message"]

    def bearing(self, token: str) -> dict[str, str]:
        return {**OURS, "Authorization": f"Bearer {token}"}

    def at_rest(self, last: str) -> None:
        """Waits until the last transition has ended with the text `last`, since another one is refused until then."""
        give_up_at_s = time.monotonic() + 60
        while last not in (told := self._last_line()):
            assert time.monotonic() < give_up_at_s, told
            time.sleep(0.1)

    def _last_line(self) -> str:
        with urllib.request.urlopen(f"{self.page}api/state", timeout=30, context=self.trusting) as answer:
            lines = json.load(answer)["clusters"][0]["lines"]
        return lines[0]["text"] if lines else ""

    def status(self, group_count: int) -> ClusterStatus:
        """The status once there are `group_count` groups."""

        async def story() -> ClusterStatus:
            async with AsyncClient(self.running.cluster.address, **self.running.cluster.credentials) as client:
                return await until(client, lambda status: len(status.groups) == group_count)

        return self.running.run(story())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Generator[Guarded]:
    base = tmp_path_factory.mktemp("page")
    make_certificates(base / "certs", days=1, hosts=["127.0.0.1"], workers=[])
    infer, operate = (add_token(base / "tokens", f"one-who-{role}s", role) for role in TokenRole)
    with running_cluster(
        make_tiny("llama", base / "tiny", max_len=512),
        workers=2,
        gateways=1,
        device_memory_bytes=8 << 20,
        secure=base / "certs",
        tokens_file=base / "tokens",
        flags={"gateway": ["--dashboard", "true"], "planner": ["--overload-policy", "recompute"]},
    ) as running:
        yield Guarded(running, base / "certs", infer, operate)


def test_only_a_token_with_the_role_operate_changes_the_cluster(guarded: Guarded) -> None:
    before = guarded.status(group_count=2).layout
    assert before is not None
    refused = {
        "none": (OURS, 401, NEEDED),
        "another scheme": ({**OURS, "Authorization": f"Basic {guarded.operate}"}, 401, NEEDED),
        "a cookie": ({**OURS, "Cookie": f"ballast-token={guarded.operate}"}, 401, NEEDED),
        "not ASCII": ({**OURS, "Authorization": "Bearer blst_\xe9"}, 401, NEEDED),
        "unknown": (guarded.bearing("blst_wrong"), 401, "the token is not known here"),
        "infer": (guarded.bearing(guarded.infer), 403, "needs a token with the role operate; one-who-infers may only"),
        "another page": ({"Authorization": f"Bearer {guarded.operate}"}, 403, "the header x-ballast-dashboard"),
    }
    for action in ("drop", "restore"):
        for name, (headers, status, words) in refused.items():
            answer = guarded.order(action, headers)
            assert answer[0] == status, (action, name, answer)
            assert words in answer[1], (action, name, answer)
    for action in ("burst", "steady", "kill?worker=worker-0"):
        assert guarded.order(action, guarded.bearing(guarded.operate))[0] == 404, action
    after = guarded.status(group_count=2).layout
    assert after is not None
    assert after.epoch == before.epoch, "refused requests changed nothing"

    status, words = guarded.order("drop", guarded.bearing(guarded.operate))
    assert (status, words) == (200, "worker-0 and worker-1 throw half of their parameters overboard")
    guarded.status(group_count=1)
    guarded.at_rest("overboard in")
    assert guarded.order("restore", guarded.bearing(guarded.operate)) == (200, "all parameters come back")
    guarded.status(group_count=2)
    guarded.at_rest("back on board in")


def shoot(browser: Browser, name: str, size: tuple[int, int]) -> None:
    if SHOTS:
        browser.screenshot(Path(SHOTS) / f"{name}.png")
        browser.resize(*size)


KEPT = "sessionStorage.length + localStorage.length + document.cookie.length"
SUNK = "document.querySelectorAll('.stone.sunk').length"


@needs_browser
@pytest.mark.parametrize(("name", "size"), [("desktop", (1280, 900)), ("phone", (390, 844))])
def test_the_page_asks_for_a_token_before_it_changes_the_cluster(
    guarded: Guarded, name: str, size: tuple[int, int]
) -> None:
    with browser_window(*size, accept_insecure=True) as browser:
        browser.open(guarded.page)
        browser.until("document.querySelectorAll('.worker:not(.down) .layer').length > 0")
        browser.until("!document.querySelector('#access').hidden")
        browser.click(".orders .drop")
        browser.until(f"document.querySelector('#notice.bad')?.textContent === {json.dumps(NEEDED)}")
        assert browser.run("return document.activeElement.id") == "token"
        shoot(browser, f"gateway-{name}-refused", size)

        browser.type("#token", guarded.infer)
        browser.click("#use")
        assert browser.run("return document.querySelector('#token').value") == ""
        browser.click(".orders .drop")
        browser.until("/one-who-infers may only infer$/.test(document.querySelector('#notice.bad')?.textContent)")
        assert browser.run(f"return {KEPT}") == 0, "a refused token is not stored"
        assert browser.run("return document.querySelectorAll('#burst:not([hidden]), .kill:not([hidden])').length") == 0
        assert browser.run(f"return {SUNK}") == 0

        browser.type("#token", guarded.operate)
        browser.click("#use")
        browser.click(".orders .drop")
        browser.until("/overboard$/.test(document.querySelector('#notice:not(.bad)')?.textContent)")
        browser.until(f"{SUNK} > 0")
        browser.open(guarded.page)  # a reload; this tab has stored the token
        browser.until(f"{SUNK} === 4")  # two layers of each worker: the gateway also knows a follower's layers
        assert browser.run("return document.querySelector('#token').hidden")
        assert browser.run("return document.documentElement.scrollWidth") <= size[0]
        shoot(browser, f"gateway-{name}-dropped", size)
        guarded.at_rest("overboard in")
        browser.click(".orders .restore")
        browser.until(f"document.querySelectorAll('.worker .layer').length > 0 && {SUNK} === 0")
        browser.click("#forget")
        assert browser.run(f"return {KEPT}") == 0
        browser.click(".orders .drop")
        browser.until("document.querySelector('#notice.bad') !== null")
    guarded.status(group_count=2)
    guarded.at_rest("back on board in")
    with browser_window(*size, accept_insecure=True) as another:
        another.open(guarded.page)
        another.until("!document.querySelector('#token').hidden")
        assert another.run(f"return {KEPT}") == 0
