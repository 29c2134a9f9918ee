"""A planner that can no longer decide exits instead of keeping the lease without a timer."""

import asyncio
import time
from unittest.mock import Mock

import pytest

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.service.leadership import LeaderAddress
from ballast.service.settings import load_settings
from ballast.service.state import StateServer
from services.planner.__main__ import build_shell
from services.planner.config import PlannerSettings
from services.planner.core.machine import PlannerCore
from services.planner.core.messages import Command, Event, SetTimer
from services.planner.peers import Members, MonitorEvents


def test_the_ttft_target_reaches_the_policy() -> None:
    state = StateServer("redis://127.0.0.1:1")
    monitor = MonitorEvents(LeaderAddress(state, "monitor", "127.0.0.1:1"))
    shell = build_shell(PlannerSettings(ttft_target_s=0.1), state, monitor, Members(lambda _: None))
    assert shell.core.conductor.rules.planning.targets.ttft_s == 0.1


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan"])
def test_a_target_that_is_not_a_duration_is_refused(seconds: str) -> None:
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


def test_no_number_of_instances_is_posted_before_one_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader has read neither layout nor loads. If it posted 0, a scaler would end all instances."""
    state = StateServer("redis://127.0.0.1:1")
    monitor = MonitorEvents(LeaderAddress(state, "monitor", "127.0.0.1:1"))
    shell = build_shell(PlannerSettings(), state, monitor, Members(lambda _: None))
    webhook = Mock()
    monkeypatch.setattr(shell, "_webhook", webhook)
    monkeypatch.setattr(shell, "_execute", Mock())
    shell.change_leadership(7)
    webhook.offer.assert_not_called()
    shell.core.conductor.sizing.wanted_count = 3
    shell.change_leadership(None)
    webhook.offer.assert_called_once_with(None)
    shell.change_leadership(8)
    webhook.offer.assert_called_once_with(None)
