"""The expected growth of an answer, learnt from earlier answers."""

import random

import pytest

from ballast.common.sampling import FinishReason, PriorityClass
from services.dispatcher.core.events import Ending
from services.dispatcher.core.growth import Growth
from services.dispatcher.core.tracked import Tracked, tracked_of
from services.dispatcher.policy.freeness import RoutingRules
from tests.support.dispatcher_core import Story, load, request

DEFAULT, BATCH = PriorityClass.DEFAULT, PriorityClass.BATCH


class Answers:
    """Ten answers run at a time, each with a token every 0.1 s. When one ends, a new one begins."""

    def __init__(self, prior_tokens: int) -> None:
        self.growth = Growth(prior_tokens)
        self.at_s = 0.0
        self._lives: list[tuple[Tracked, int]] = []
        self._random = random.Random(1)

    def run(self, mean_tokens: float, seconds: float) -> None:
        until_s = self.at_s + seconds
        while self.at_s < until_s:
            self.at_s += 0.1
            while len(self._lives) < 10:
                length = 1 + int(self._random.expovariate(1 / mean_tokens))
                self._lives.append((tracked(), length))
            for live in list(self._lives):
                live[0].output_token_ids.append(1)
                if len(live[0].output_token_ids) >= live[1]:
                    self._lives.remove(live)
                    self.growth.leave(live[0], ended=True)
            if self.growth.is_due(self.at_s):
                self.growth.look([one for one, _ in self._lives], self.at_s)
                self.growth.check([one for one, _ in self._lives])


def tracked(priority: PriorityClass = DEFAULT) -> Tracked:
    return Tracked(request=request("r", priority=priority), serial=1, arrived_at_s=0.0, queued_at_s=0.0)


def test_the_estimate_moves_from_the_prior_to_the_mean_answer() -> None:
    answers = Answers(prior_tokens=64)
    assert answers.growth.tokens(DEFAULT) == 64
    answers.run(mean_tokens=300, seconds=600)
    assert answers.growth.tokens(DEFAULT) == pytest.approx(300, rel=0.2)
    assert answers.growth.tokens(BATCH) == 64, "each class is learnt separately"


def test_running_answers_count_before_any_of_their_length_has_ended() -> None:
    """The shortest of the long answers end first. If only ended answers counted, all answers would seem short."""
    growth, lives = Growth(64), [tracked() for _ in range(20)]
    for one in lives:
        one.output_token_ids += [1] * 500
    growth.leave(lives.pop(), ended=True)
    growth.look(lives, 10.0)
    assert growth.tokens(DEFAULT) == pytest.approx((4 * 64 + 20 * 500) / 5, rel=0.01)


def test_old_data_is_forgotten() -> None:
    answers = Answers(prior_tokens=64)
    answers.run(mean_tokens=400, seconds=2_000)
    answers.run(mean_tokens=40, seconds=2_000)
    assert answers.growth.tokens(DEFAULT) < 60


def test_a_truncated_answer_does_not_count_as_ended() -> None:
    growth, one = Growth(64), tracked()
    one.output_token_ids += [1] * 400
    growth.leave(one, ended=False)
    growth.look([], 10.0)
    assert growth.tokens(DEFAULT) == pytest.approx((4 * 64 + 400) / 4, rel=0.01)


def test_tokens_of_earlier_attempts_do_not_count() -> None:
    """A resumed request that is refused is submitted again and again."""
    growth, resumed = Growth(64), tracked_of(request("r", answer=(1,) * 500), 1, 0.0)
    growth.look([resumed], 10.0)
    growth.leave(resumed, ended=False)
    growth.look([], 20.0)
    assert growth.tokens(DEFAULT) == 64


def test_new_requests_are_placed_where_they_can_grow_like_earlier_answers() -> None:
    """Worker a has the fewest requests but room for only 64 tokens; b has room for 640."""
    for ended_tokens, expected in ((1, "a"), (2_000, "b")):
        story = Story("a", "b", routing=RoutingRules(growth_tokens=16))
        story.submit("before", max_tokens=4_000)
        story.now_s = 10.0
        ending = Ending(story.handle_of("before"), FinishReason.STOP)
        story.step("a", {"before": [1] * ended_tokens}, endings=[ending])
        story.step("a", report=load(used_block_count=59, running_count=1))
        story.step("b", report=load(used_block_count=23, running_count=9, max_running_count=16))
        assert story.submit("next", max_tokens=4_000).places == [("next", expected)]
