"""Endless offline load in addition to a trace: a few requests always wait to be pulled by a worker."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ballast.common.errors import DeadlineExceeded, InvariantViolation, Overloaded
from ballast.common.ids import RequestId
from ballast.common.sampling import PriorityClass, SamplingParams
from services.dispatcher.core.events import Deliver, Fail, Finish, Refuse, Request
from sim.clock import Clock

_PREFIX = "offline-"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineLoad:
    """Offline load. `lengths`: (prompt, answer) tokens, drawn with replacement. No request is sent after `until_s`."""

    lengths: Sequence[tuple[int, int]]
    waiting_count: int = 8  # requests without a token that each dispatcher always has
    until_s: float = math.inf
    priority: PriorityClass = PriorityClass.BATCH  # another class represents engines that only have priorities


class OfflineClients:
    """Sends offline requests and counts their tokens; prompt tokens count when the answer's first token arrives."""

    def __init__(self, clock: Clock, load: OfflineLoad, seed: int, deadline_s: float, zero_s: float) -> None:
        """`zero_s`: time at which the trace begins."""
        self.token_count = 0
        self._clock = clock
        self._load = load
        self._random = random.Random(seed)
        self._deadline_s = deadline_s
        self._until_s = zero_s + load.until_s
        self._open: dict[RequestId, tuple[int, int, int]] = {}  # (prompt, answer, tokens received)
        self._submits: Sequence[Callable[[Request], None]] = ()
        self._next = 0

    @property
    def open_ids(self) -> set[RequestId]:
        return set(self._open)

    def owns(self, request_id: RequestId) -> bool:
        return request_id.startswith(_PREFIX)

    def begin(self, submits: Sequence[Callable[[Request], None]]) -> None:
        self._submits = submits
        for _ in range(self._load.waiting_count * len(submits)):
            self._submit()

    def _submit(self) -> None:
        if self._clock.now_s > self._until_s:
            return
        prompt, answer = self._random.choice(self._load.lengths)
        request_id, self._next = RequestId(f"{_PREFIX}{self._next}"), self._next + 1
        self._open[request_id] = prompt, answer, 0
        request = Request(
            request_id=request_id,
            prompt_token_ids=(0,) * prompt,
            sampling=_sampling(answer),
            priority=self._load.priority,
            deadline_at_s=self._clock.now_s + self._deadline_s,
            omit_text=True,
        )
        self._submits[self._next % len(self._submits)](request)

    def as_sampled(self, request: Request) -> SamplingParams:
        return _sampling(self._open[request.request_id][1] if request.request_id in self._open else 1)

    def deliver(self, command: Deliver) -> None:
        """Receive tokens.

        Raises:
            InvariantViolation: a token is lost, repeated or skipped.
        """
        prompt, answer, had = self._open[command.request_id]
        wanted = range(prompt + had, prompt + had + len(command.token_ids))
        if list(command.token_ids) != list(wanted):
            raise InvariantViolation(f"{command.request_id} gets {command.token_ids} after {had} tokens")
        self.token_count += len(command.token_ids) + (0 if had else prompt)
        self._open[command.request_id] = prompt, answer, had + len(command.token_ids)
        if not had:
            self._clock.after(0.0, b"offline", self._submit)

    def end(self, command: Finish | Fail | Refuse) -> None:
        """End a request. Another one takes the place of a request that waited until its deadline, but not of one that
        was refused, because the queue is full.

        Raises:
            InvariantViolation: the answer is too short, or the request failed for another reason.
        """
        _, answer, had = self._open.pop(command.request_id)
        if not isinstance(command, Finish):
            if isinstance(command.error, DeadlineExceeded):
                if not had:
                    self._clock.after(0.0, b"offline", self._submit)
                return
            if isinstance(command.error, Overloaded):
                return
            raise InvariantViolation(f"{command.request_id} ends with {command.error}")
        if had != answer:
            raise InvariantViolation(f"{command.request_id} ends with {had} of {answer} tokens")


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
