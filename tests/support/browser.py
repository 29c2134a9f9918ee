"""A real browser for tests: headless Chromium, driven over the WebDriver protocol of its own chromedriver."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self

from tools.local.ports import free_port

_START_WITHIN_S = 60.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's key of an element reference


def find_browser() -> tuple[str, str] | None:
    """Paths of Chromium and of chromedriver, or None if they are not installed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser is not None and driver is not None else None


class Browser:
    """A browser session with one window."""

    def __init__(self, driver_url: str, session: str) -> None:
        self._url = f"{driver_url}/session/{session}"

    # Any: JSON from the driver.
    def _ask(self, method: str, path: str, **body: Any) -> Any:
        return ask(f"{self._url}/{path}", method, body)

    def open(self, url: str) -> None:
        self._ask("POST", "url", url=url)

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the viewport, in CSS pixels."""
        params = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("POST", "goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=params)

    def run(self, script: str, *args: Any) -> Any:
        """Runs a function body in the page; returns its value."""
        return self._ask("POST", "execute/sync", script=script, args=list(args))

    def click(self, selector: str) -> None:
        """Clicks as a person would; fails if the element is hidden, disabled or covered."""
        found = self._ask("POST", "element", using="css selector", value=selector)
        self._ask("POST", f"element/{found[_ELEMENT]}/click")

    def type(self, selector: str, text: str) -> None:
        """Replaces the element's text, key by key."""
        found = self._ask("POST", "element", using="css selector", value=selector)
        self._ask("POST", f"element/{found[_ELEMENT]}/value", text=text)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def until(self, script: str, within_s: float = 60.0) -> Any:
        """Polls a JavaScript expression; returns its first truthy value, or fails with the page's text."""
        give_up_at_s = time.monotonic() + within_s
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < give_up_at_s, f"{script} never became true; the page:\n{self.text('body')}"
            time.sleep(0.05)
        return value

    def errors(self) -> list[str]:
        """Messages of the browser's console since the last call."""
        return [entry["message"] for entry in self._ask("POST", "se/log", type="browser") if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        """Writes a picture of the whole page, including what is outside the viewport."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return document.documentElement.clientWidth")
        self.resize(width, height)
        path.write_bytes(base64.b64decode(self._ask("GET", "screenshot")))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            ask(self._url, "DELETE", {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Any: JSON in both directions.
def ask(url: str, method: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode() if method == "POST" else None, method=method)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {url}: {error.read().decode()[:500]}") from None


@contextlib.contextmanager
def browser_window(width: int = 1280, height: int = 900, *, accept_insecure: bool = False) -> Generator[Browser]:
    """A browser session. `accept_insecure`: accept certificates of unknown CAs."""
    found = find_browser()
    assert found is not None, "call find_browser() first"
    chromium, chromedriver = found
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="browser-") as folder:
        environ = {**os.environ, "HOME": folder, "XDG_CONFIG_HOME": folder, "XDG_CACHE_HOME": folder}
        driver = subprocess.Popen(
            [chromedriver, f"--port={port}"], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            session = _start(f"http://127.0.0.1:{port}", chromium, folder, accept_insecure)
            with Browser(f"http://127.0.0.1:{port}", session) as browser:
                browser.resize(width, height)
                yield browser
        finally:
            driver.terminate()
            driver.wait(10)


def _start(url: str, chromium: str, folder: str, accept_insecure: bool) -> str:
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium's sandbox does not run as root
    options = {"binary": chromium, "args": [*arguments, f"--user-data-dir={folder}/profile"]}
    wanted = {
        "alwaysMatch": {
            "acceptInsecureCerts": accept_insecure,
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
    }
    give_up_at_s = time.monotonic() + _START_WITHIN_S
    while True:
        try:
            return ask(f"{url}/session", "POST", {"capabilities": wanted})["sessionId"]
        except (OSError, AssertionError):
            if time.monotonic() > give_up_at_s:
                raise
            time.sleep(0.1)
