"""A planner that can no longer decide exits instead of keeping the lease without a timer."""

import asyncio
import time
from pathlib import Path

import pytest

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.common.wanted import Wanted
from ballast.service.leadership import LeaderAddress
from ballast.service.settings import load_settings
from ballast.service.state import StateServer
from services.planner.__main__ import build_shell
from services.planner.config import PlannerSettings
from services.planner.core.machine import PlannerCore
from services.planner.core.messages import Command, Event, SetTimer
from services.planner.peers import Members, MonitorEvents
from services.planner.shell.webhook import Webhook


def test_the_ttft_target_reaches_the_policy() -> None:
    state = StateServer("redis://127.0.0.1:1")
    monitor = MonitorEvents(LeaderAddress(state, "monitor", "127.0.0.1:1"))
    shell = build_shell(PlannerSettings(ttft_target_s=0.1), state, monitor, Members(lambda _: None))
    assert shell.core.conductor.rules.planning.targets.ttft_s == 0.1


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan"])
def test_a_target_that_is_no_time_is_refused(seconds: str) -> None:
    with pytest.raises(ConfigError, match=r"planner\.ttft_target_s"):
        load_settings(PlannerSettings, [f"--ttft-target-s={seconds}"])


@pytest.mark.parametrize("error", [KeyError("w9"), ValueError("too large"), InvariantViolation("layers are missing")])
def test_any_failure_in_a_timer_ends_the_planner(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        settings = PlannerSettings()
        state = StateServer("redis://127.0.0.1:1")
        monitor = MonitorEvents(LeaderAddress(state, "monitor", "127.0.0.1:1"))
        shell = build_shell(settings, state, monitor, Members(lambda _: None))

        def handle(_: PlannerCore, event: Event) -> list[Command]:
            if "timer" in event.cause_id:
                raise error
            return [SetTimer(time.monotonic())]

        monkeypatch.setattr(PlannerCore, "handle", handle)
        try:
            async with asyncio.timeout(30):
                await shell.run()
        finally:
            await state.close()

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(run())
    [end] = caught.value.exceptions
    assert isinstance(end, InvariantViolation)
    assert str(error.args[0]) in str(end)


def test_a_number_that_is_not_known_yet_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that has just started knows neither the layout nor any load, and a scaler would end all workers."""
    offered: list[Wanted | None] = []

    def offer(_: Webhook, wanted: Wanted | None) -> None:
        offered.append(wanted)

    monkeypatch.setattr(Webhook, "offer", offer)
    (secret := tmp_path / "secret").write_text("0123456789abcdef")

    async def story() -> None:
        settings = PlannerSettings(scale_webhook="http://127.0.0.1:1/", scale_webhook_secret_file=secret)
        state = StateServer("redis://127.0.0.1:1")
        monitor = MonitorEvents(LeaderAddress(state, "monitor", "127.0.0.1:1"))
        shell = build_shell(settings, state, monitor, Members(lambda _: None))
        running = asyncio.create_task(shell.run())
        await asyncio.sleep(0)
        shell.change_leadership(7)
        running.cancel()
        await asyncio.wait([running])
        await state.close()

    asyncio.run(story())
    assert offered == [None]
