"""Events are logged when an invariant breaks, without text or tokens of prompts and answers."""

from ballast.common.ids import RequestId
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from services.dispatcher.core.events import Ending, Request, RequestSubmitted, StepReceived
from tests.support.dispatcher_core import key, load


def test_no_event_shows_text_of_a_client() -> None:
    request = Request(
        request_id=RequestId("r1"),
        prompt_token_ids=(411, 422),
        sampling=SamplingParams(stop=("diary",)),
        priority=PriorityClass.DEFAULT,
        deadline_at_s=9.0,
    )
    shown = repr(RequestSubmitted(1.0, request))
    assert "r1" in shown
    assert "411" not in shown
    assert "diary" not in shown
    assert "diary" not in repr(Ending(1, FinishReason.STOP, matched_stop="diary"))
    step = StepReceived(1.0, key("w"), [1], [2], [411, 422], ["diary"], ["diary"], (), load(), 1)
    assert "411" not in repr(step)
    assert "diary" not in repr(step)
