"""Clients of a simulation, and records of their requests. Checks that no token is lost, repeated or skipped (I6)."""

from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

from ballast.common.errors import DeadlineExceeded, InvariantViolation, Overloaded
from ballast.common.ids import RequestId
from ballast.common.sampling import PriorityClass, SamplingParams
from services.dispatcher.core.events import Deliver, Fail, Finish, Refuse, Request
from sim.clock import Clock
from sim.offline import OfflineClients
from sim.results import Outcome, RequestRecord

_DISTINCT = 1000
_MARGIN_S = 1e-9  # tolerance for rounding in sums of instants

Submit = Callable[[Request], None]


# Equal values share one object, because memory access dominates the run time of simulations with thousands of
# instances.


@lru_cache(maxsize=1 << 14)
def _prompt(token_count: int, token_id: int) -> tuple[int, ...]:
    return (token_id,) * token_count


def _prompt_of(token_count: int, hash_ids: tuple[int, ...], hash_tokens: int) -> tuple[int, ...]:
    """The prompt's tokens. Two prompts share a prefix of `hash_tokens` tokens for each leading hash id that they have
    in common.
    """
    token_ids: list[int] = []
    hash_tokens = min(hash_tokens, token_count)
    for hash_id in hash_ids[: -(-token_count // hash_tokens)]:
        token_ids.append(hash_id // _DISTINCT)
        token_ids.extend((hash_id % _DISTINCT,) * (hash_tokens - 1))
    token_ids = token_ids[:token_count]
    return (*token_ids, *token_ids[-1:] * (token_count - len(token_ids)))


@lru_cache(maxsize=1 << 14)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)


class Arrival(NamedTuple):
    at_s: float
    input_tokens: int
    output_tokens: int
    caller: str = ""
    hash_ids: tuple[int, ...] = ()  # ids of the prompt's parts; empty: no shared prefix, unless all prompts are equal
    hash_tokens: int = 512  # tokens per hash id


class Clients:
    def __init__(
        self,
        clock: Clock,
        arrivals: Sequence[Arrival],
        zero_s: float,
        deadline_s: float,
        *,
        max_model_len: int,
        distinct: bool = False,
        classes: Sequence[PriorityClass] = (PriorityClass.DEFAULT,),
        offline: OfflineClients | None = None,
    ) -> None:
        """`zero_s`: time at which the trace begins. `distinct`: prompts share no tokens, except through `hash_ids`.
        `classes`: assigned to requests in turn. `offline`: load in addition to the trace.

        Requests set no max_tokens: only the model knows the length of an answer.
        """
        self._distinct = distinct
        self._classes = classes
        self.offline = offline
        self._max_model_len = max_model_len
        self._clock = clock
        self._zero_s = zero_s
        self._deadline_s = deadline_s
        self.records = [
            RequestRecord(index, f"r{index}", arrival.input_tokens, arrival.output_tokens, arrival.at_s)
            for index, arrival in enumerate(arrivals)
        ]
        self._callers = [arrival.caller for arrival in arrivals]
        self._hash_ids = [(arrival.hash_ids, arrival.hash_tokens) for arrival in arrivals]
        self._next_index = 0
        self._by_id: dict[RequestId, RequestRecord] = {}  # requests submitted and not ended
        self._submits: Sequence[Submit] = ()
        self.ended_count = 0
        self.stopped = not self.records  # everything has ended or was stopped

    def begin(self, submits: Sequence[Submit]) -> None:
        """Submit each request at its arrival time, to the dispatchers in turn."""
        self._submits = submits
        if self.offline is not None:
            self.offline.begin(submits)
        self._expect_next()

    def _expect_next(self) -> None:
        if self._next_index < len(self.records):
            record = self.records[self._next_index]
            self._clock.at(max(self._clock.now_s, self._zero_s + record.arrival_s), b"arrival", self._arrive)

    def _arrive(self) -> None:
        record = self.records[self._next_index]
        self._next_index += 1
        request_id = RequestId(record.request_id)
        self._by_id[request_id] = record
        request = Request(
            request_id=request_id,
            prompt_token_ids=self._prompt(record),
            sampling=_sampling(max(1, self._max_model_len - record.input_tokens)),
            priority=self._classes[record.index % len(self._classes)],
            deadline_at_s=self._clock.now_s + self._deadline_s,
            omit_text=True,
            caller=self._callers[record.index],
        )
        self._submits[record.index % len(self._submits)](request)
        self._expect_next()

    def _prompt(self, record: RequestRecord) -> tuple[int, ...]:
        hash_ids, hash_tokens = self._hash_ids[record.index]
        if hash_ids:
            return _prompt_of(record.input_tokens, hash_ids, hash_tokens)
        return _prompt(record.input_tokens, record.index % _DISTINCT if self._distinct else 0)

    def stop(self) -> None:
        """End the simulation; requests in progress stay open."""
        self.stopped = True
        self._clock.halt()

    def as_sampled(self, request: Request) -> SamplingParams:
        """Sampling parameters of the request, whose answer ends at the trace's length."""
        if self.offline is not None and self.offline.owns(request.request_id):
            return self.offline.as_sampled(request)
        record = self._by_id.get(request.request_id)
        return _sampling(1 if record is None else record.wanted_tokens)  # None: it has ended, and will be aborted

    def deliver(self, command: Deliver, at_s: float) -> None:
        if self.offline is not None and self.offline.owns(command[0]):
            self.offline.deliver(command)
            return
        record = self._by_id[command[0]]
        times_s = record.token_times_s
        at_s -= self._zero_s
        place = record.input_tokens + len(times_s)
        for token_id in command[1]:
            if token_id != place:
                raise InvariantViolation(
                    f"{record.request_id} gets the token of position {token_id} after {len(times_s)} tokens"
                )
            place += 1
            times_s.append(at_s)

    def deliver_steps(self, commands: Iterable[Deliver], instants_s: "array[float]") -> None:
        """Deliver one token to each request at each of the instants."""
        since_s = array("d", [at_s - self._zero_s for at_s in instants_s])
        count = len(since_s)
        for command in commands:
            if self.offline is not None and self.offline.owns(command[0]):
                self.offline.deliver(command)
                continue
            record, token_ids = self._by_id[command[0]], command[1]
            times_s = record.token_times_s
            place = record.input_tokens + len(times_s)
            if len(token_ids) != count or token_ids[0] != place or token_ids[-1] != place + count - 1:
                raise InvariantViolation(f"{record.request_id} gets {len(token_ids)} tokens, not those from {place} on")
            times_s.extend(since_s)

    def end(self, command: Finish | Fail | Refuse, at_s: float) -> None:
        if self.offline is not None and self.offline.owns(command.request_id):
            self.offline.end(command)
            return
        record = self._by_id.pop(command.request_id, None)
        if record is None:
            raise InvariantViolation(f"{command.request_id} ends twice")
        self.ended_count += 1
        record.end_s = at_s - self._zero_s
        record.token_times_s = record.token_times_s[:]  # trims the spare capacity of the grown array
        if self.ended_count == len(self.records):
            self.stop()
        if isinstance(command, Finish):
            record.outcome = Outcome.FINISHED
            if len(record.token_times_s) != record.wanted_tokens:
                raise InvariantViolation(f"{record.request_id} ends with {len(record.token_times_s)} tokens")
            return
        record.error = str(command.error)
        if isinstance(command.error, Overloaded):
            record.outcome = Outcome.REFUSED
        elif isinstance(command.error, DeadlineExceeded):
            record.outcome = Outcome.DEADLINE
        else:
            record.outcome = Outcome.FAILED

    def check(self, known: Set[RequestId]) -> None:
        """Raise InvariantViolation unless dispatchers have exactly the requests that have not ended."""
        mine = set(self._by_id)
        if self.offline is not None:
            mine |= self.offline.open_ids
        if mine != known:
            raise InvariantViolation(f"dispatchers and clients disagree about {sorted(mine ^ known)}")
        now_s = self._clock.now_s - self._zero_s
        for record in self._by_id.values():
            if now_s - record.arrival_s > self._deadline_s + _MARGIN_S:
                raise InvariantViolation(f"{record.request_id} still runs after its deadline")
