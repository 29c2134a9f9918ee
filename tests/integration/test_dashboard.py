"""The page that `ballast up --dashboard` serves, in a real browser, and the requests that its server must refuse."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, browser_window, find_browser

START_WITHIN_S = 180.0
SHOTS = os.environ.get("BALLAST_SCREENSHOTS")  # a folder for screenshots that the documentation uses

needs_browser = pytest.mark.skipif(find_browser() is None, reason="Chromium and chromedriver are not installed")


@contextlib.contextmanager
def page_of(folder: Path, *arguments: str) -> Generator[str]:
    """Yields the URL of the dashboard of a cluster of emulated GPUs."""
    flags = [
        "--engine",
        "emulated",
        "--profile",
        "A100-40G",
        "--model",
        "Qwen2.5-14B",
        "--port",
        "0",
        "--gateways",
        "0",
    ]
    log = folder / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.cli.main", "up", *flags, "--dashboard-port", "0", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    try:
        give_up_at_s = time.monotonic() + START_WITHIN_S
        while "dashboard: " not in (told := log.read_text()):
            assert process.poll() is None, told
            assert time.monotonic() < give_up_at_s, told
            time.sleep(0.1)
        yield told.split("dashboard: ")[1].split()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with page_of(tmp_path_factory.mktemp("up"), "--workers", "2") as url:
        yield url


def shoot(browser: Browser, name: str) -> None:
    if SHOTS:
        browser.screenshot(Path(SHOTS) / f"{name}.png")
        browser.resize(1280, 900)


HELD = "[...document.querySelectorAll('.worker')].map(w => Number(w.dataset.held))"
ANSWERED = "document.querySelector('#verdict .answered')?.textContent"
LOST = "document.querySelector('#verdict .lost')?.textContent"


@pytest.mark.rotating
@needs_browser
def test_a_burst_causes_a_drop_and_a_restore(page: str) -> None:
    with browser_window() as browser:
        browser.open(page)
        browser.until("document.querySelectorAll('.worker .hull .layer').length === 2 * 48")
        assert "Qwen2.5-14B on 2 workers" in browser.text("#what")
        kv_before = browser.until("document.querySelector('.worker .kv').getBoundingClientRect().width")
        shoot(browser, "dashboard-calm")
        browser.click("#burst")
        assert browser.until(f"{HELD}.reduce((a, b) => a + b, 0) === 48"), "each layer is held exactly once"
        browser.until("document.querySelectorAll('.stone.sunk').length === 48")
        browser.until(f"document.querySelector('.worker .kv').getBoundingClientRect().width > 1.8 * {kv_before}")
        browser.until("document.querySelector('.lines li.drop')?.innerText.includes('overboard in')")
        shoot(browser, "dashboard-dropped")
        browser.until(f"{HELD}.every(n => n === 48)", within_s=150)
        browser.until("document.querySelector('.lines li.restore')?.innerText.includes('back on board')")
        browser.until("document.querySelectorAll('.stone.sunk').length === 0")
        assert browser.until(f"/^(\\d+) of \\1$/.test({ANSWERED})", within_s=150), "all requests are answered"
        assert browser.run(f"return {LOST}") == "0"
        assert "99 of 100 requests had their first token within" in browser.text("#verdict p")
        assert browser.errors() == []


@pytest.mark.rotating
@needs_browser
def test_a_killed_worker_reappears_on_the_page_and_no_request_is_lost(page: str) -> None:
    with browser_window() as browser:
        browser.open(page)
        browser.until("document.querySelectorAll('.worker:not(.down)').length === 2")
        browser.until("!document.querySelector('#burst').disabled", within_s=150)
        browser.click("#burst")
        browser.until("Number(document.querySelector('.tile b').textContent) + 1")
        browser.until("/[1-9]\\d* running/.test(document.querySelector('[data-worker=worker-1] .state').textContent)")
        browser.click("[data-worker='worker-1'] .kill")
        browser.until("document.querySelector('#notice').textContent === 'worker-1 is killed'")
        browser.until("[...document.querySelectorAll('.lines li.process')].some(l => /was killed/.test(l.innerText))")
        browser.until(
            "[...document.querySelectorAll('.lines li.process')].some(l => /is back after/.test(l.innerText))"
        )
        browser.until("document.querySelectorAll('.worker:not(.down)').length === 2")
        assert browser.until(f"/^(\\d+) of \\1$/.test({ANSWERED})", within_s=200), "all requests are answered"
        assert browser.run(f"return {LOST}") == "0"
        shoot(browser, "dashboard-killed")


@needs_browser
def test_drop_and_restore_by_hand(page: str) -> None:
    with browser_window() as browser:
        browser.open(page)
        browser.until(f"{HELD}.length === 2 && {HELD}.every(n => n === 48)", within_s=150)
        browser.click(".orders .drop")
        browser.until("/overboard$/.test(document.querySelector('#notice').textContent)")
        browser.until("document.querySelectorAll('.stone.sunk').length === 48")
        # A restore is refused until the drop has ended.
        browser.until("document.querySelector('.lines li')?.innerText.includes('overboard in')")
        browser.click(".orders .restore")
        browser.until(f"{HELD}.every(n => n === 48)")


@needs_browser
def test_a_phone_shows_everything_within_its_width(page: str) -> None:
    with browser_window(390, 844) as browser:
        browser.open(page)
        browser.until("document.querySelectorAll('.worker .hull .layer').length === 2 * 48")
        assert browser.run("return document.documentElement.scrollWidth") == 390
        beyond = "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 390.5"
        assert browser.run(f"return {beyond} && !e.closest('.scroll')).map(e => e.outerHTML.slice(0, 80))") == []
        small = (
            "[...document.querySelectorAll('button:not([hidden])')].filter(b => b.offsetHeight && b.offsetHeight < 22)"
        )
        assert browser.run(f"return {small}.length") == 0
        assert "Press Burst" in browser.text("#lead")
        shoot(browser, "dashboard-alone-phone")


WIDTHS = ((390, 844), (1280, 900), (1920, 1080))
RETAINED = "[...document.querySelectorAll('.retained')].map(e => e.getBoundingClientRect().width)"


def assert_understood(browser: Browser, width: int) -> None:
    """Checks that the page shows at first sight what it is about, which button to press and what each column means, and
    that nothing is cut off.
    """
    assert "Press Burst" in browser.text("#lead")
    does = browser.run("return [...document.querySelectorAll('.does')].map(e => e.innerText)")
    assert "overboard" in does[0]
    assert "wait in line" in does[1]
    assert browser.run("return document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('.state, .kvtext, td, th, .tile b')].filter(e => e.scrollWidth > e.clientWidth"
    assert browser.run(f"return {cut} + 1 && e.clientWidth).map(e => e.innerText)") == []
    beyond = "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)"
    assert browser.run("return [...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)")
    assert browser.run(f"return {beyond}.map(e => e.outerHTML.slice(0, 80))") == []
    named = browser.text("footer")
    assert all(word in named for word in ("parameters", "in use", "full", "retained", "free", "overboard", "slow"))
    tops = browser.run("return [...document.querySelectorAll('.cluster')].map(e => e.getBoundingClientRect().top)")
    assert tops[0] == tops[1]


def assert_seen_together(browser: Browser) -> None:
    """Checks that on a phone the figures and the memory of both clusters fit on one screen while a burst runs."""
    browser.resize(390, 844)
    browser.run("document.querySelector('main').scrollIntoView()")
    low = "[...document.querySelectorAll('.cluster')].map(c => c.querySelector('.hull').getBoundingClientRect().bottom)"
    assert max(browser.run(f"return {low}")) < 844
    if SHOTS:
        browser.screenshot(Path(SHOTS) / "dashboard-phone.png")
    browser.resize(1400, 900)


def post(url: str, headers: dict[str, str]) -> tuple[int, str]:
    request = urllib.request.Request(url, b"", headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)["message"]
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode()
        return error.code, json.loads(text)["message"] if text.startswith("{") else text


def test_requests_of_other_pages_or_host_names_are_refused(page: str) -> None:
    ours = {"X-Ballast-Dashboard": "1"}
    assert post(f"{page}api/burst", {}) == (403, "the header x-ballast-dashboard is missing")
    assert post(f"{page}api/burst", {**ours, "Host": "evil.example"})[0] == 400
    assert post(f"{page}api/sink", ours) == (404, "'sink' cannot be done here")
    assert post(f"{page}api/drop?cluster=7", ours) == (404, "no cluster 7")
    assert post(f"{page}api/kill?worker=planner-0", ours) == (404, "no worker 'planner-0' runs on this machine")
    with urllib.request.urlopen(page, timeout=30) as answer:
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert "http://" not in answer.read().decode().replace("http://www.w3.org", ""), "no resource of another host"


@pytest.mark.rotating
@needs_browser
def test_a_twin_gets_the_same_burst(tmp_path: Path) -> None:
    with page_of(tmp_path, "--workers", "2", "--twin", "recompute") as url, browser_window(1400, 900) as browser:
        browser.open(url)
        browser.until("document.querySelectorAll('.cluster').length === 2")
        browser.until("document.querySelectorAll('.worker .hull .layer').length === 4 * 48")
        for width, height in WIDTHS:
            browser.resize(width, height)
            assert_understood(browser, width)
        browser.resize(1400, 900)
        browser.click("#burst")
        numbers = "[...document.querySelectorAll('#verdict td.p99')].filter(e => /\\d/.test(e.textContent)).length"
        browser.until(f"{numbers} === 2")
        assert browser.text("#verdict p").startswith("The same burst runs on both clusters. So far")
        browser.until("document.querySelectorAll('[data-cluster=\"0\"] .stone.sunk').length === 48", within_s=90)
        assert browser.run("return document.querySelectorAll('[data-cluster=\"1\"] .stone.sunk').length") == 0
        browser.until("document.querySelector('[data-cluster=\"1\"] .tile b.alarm')")
        shoot(browser, "dashboard-burst")
        assert_seen_together(browser)
        done = "[...document.querySelectorAll('#verdict .answered')].every(e => /^(\\d+) of \\1$/.test(e.textContent))"
        # A cluster that has answered only the first few requests looks better than it really is.
        early = "document.querySelector('#verdict .best') && 'called the best too early'"
        assert browser.until(f"{done} ? 'done' : {early}", within_s=240) == "done"
        sent = browser.run("return [...document.querySelectorAll('#verdict .answered')].map(e => e.textContent)")
        assert sent[0] == sent[1]
        assert "with drop" in browser.text("#verdict p")
        assert "with recompute" in browser.text("#verdict p")
        told = browser.text("#verdict p")
        assert re.match(r"First tokens came [\d.]+ times sooner with |It makes no difference here", told), told
        browser.until(f"{RETAINED}.some(width => width > 0)")  # prefixes of finished prompts
        for width, height in WIDTHS:
            browser.resize(width, height)
            assert_understood(browser, width)
            if SHOTS:
                browser.screenshot(Path(SHOTS) / f"dashboard-verdict-{width}.png")
        browser.resize(1400, 900)
        # The retained prefixes are evicted first, so that the next burst finds the memory free.
        browser.until("!document.querySelector('#burst').disabled")
        before = max(browser.run(f"return {RETAINED}"))
        browser.click("#burst")
        browser.until(f"{RETAINED}.some(width => width < {before} / 2)")
        assert browser.errors() == []
