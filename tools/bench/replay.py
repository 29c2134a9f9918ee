"""Open-loop replay of a trace: requests are sent at the trace's times, whether or not earlier ones have ended.

This module does not depend on gRPC: the cluster is a `Target` (see `tools.bench.target`), for which tests use timers.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ballast.common.errors import BallastError, DeadlineExceeded, Overloaded
from tools.bench.records import BenchRecord, ReplayRun, RequestOutcome, StatusSample
from tools.bench.traces import Trace, TraceRequest

_STATUS_INTERVAL_S = 0.5


class Target(Protocol):
    """A cluster under load. Its failures are `BallastError`s."""

    def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        deadline_s: float,
        last_token: int | None = None,
    ) -> AsyncIterator[Sequence[int]]:
        """Yield new tokens as they arrive, `max_tokens` in all. Raises a BallastError if the request fails.

        With `last_token`, the request has the model's maximum as its limit instead, and the answer ends at that
        token.
        """
        ...

    async def sample(self) -> StatusSample:
        """Sample the state of the cluster; the caller sets `at_s`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    seed: int = 0  # seed of the random prompts
    deadline_s: float = 300.0  # deadline of each request
    record_tokens: bool = False
    request_id_prefix: str = "replay"
    # (prompt, answer length) -> last token of the answer, if known; the cluster then does not know the length.
    last_token: Callable[[Sequence[int], int], int] | None = None


@dataclass(slots=True)
class ReplayProgress:
    """Counts of a running replay, for display."""

    total_count: int
    span_s: float  # arrival of the last request
    elapsed_s: float = 0.0
    sent_count: int = 0
    finished_count: int = 0
    refused_count: int = 0
    failed_count: int = 0  # requests with any other outcome
    token_count: int = 0

    @property
    def ended_count(self) -> int:
        return self.finished_count + self.refused_count + self.failed_count

    @property
    def running_count(self) -> int:
        return self.sent_count - self.ended_count

    @property
    def eta_s(self) -> float:
        """Seconds until the last arrival; after it, the estimated time until all requests have ended."""
        left_s = self.span_s - self.elapsed_s
        if left_s > 0 or not self.ended_count:
            return max(left_s, 0.0)
        return (self.total_count - self.ended_count) * self.elapsed_s / self.ended_count


class Replay:
    """One replay of `trace` on `target`, with prompts of random tokens below `vocab_size`.

    `stop()` ends it early; `run` then returns the records so far.
    """

    def __init__(
        self,
        target: Target,
        trace: Trace,
        options: ReplayOptions,
        vocab_size: int,
        on_progress: Callable[[ReplayProgress], None] = lambda _: None,
    ) -> None:
        self.progress = ReplayProgress(len(trace.requests), trace.span_s)
        self._target = target
        self._trace = trace
        self._options = options
        self._vocab_size = vocab_size
        self._on_progress = on_progress
        self._records: list[BenchRecord] = []
        self._samples: list[StatusSample] = []
        self._failed_sample_count = 0
        self._stopped = asyncio.Event()
        self._zero_s = 0.0  # time zero of the replay, in the event loop's time

    def stop(self) -> None:
        self._stopped.set()

    def now_s(self) -> float:
        """Seconds since time zero of the replay."""
        return asyncio.get_running_loop().time() - self._zero_s

    async def run(self) -> ReplayRun:
        self._zero_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as watchers:
            sampling = watchers.create_task(self._watch(), name="watch the cluster")
            complete = await self._run_requests()
            sampling.cancel()
        ends_s = [r.end_s for r in self._records if r.end_s is not None]
        return ReplayRun(self._records, self._samples, complete, max(ends_s, default=0.0), self._failed_sample_count)

    async def _run_requests(self) -> bool:
        """Send the requests and wait for their ends. Returns False if `stop` was called."""
        async with asyncio.TaskGroup() as requests:
            stopping = requests.create_task(self._stopped.wait(), name="wait for stop")
            sending = requests.create_task(self._send_all(), name="send")
            await asyncio.wait((stopping, sending), return_when=asyncio.FIRST_COMPLETED)
            complete = not stopping.done()
            for task in (stopping, sending):
                task.cancel()
        return complete and not self._stopped.is_set()

    async def _send_all(self) -> None:
        """Send each request at its time, then wait for all of them. Cancelling this task cancels the running
        requests.
        """
        last_token = self._options.last_token
        async with asyncio.TaskGroup() as requests:
            for index, request in enumerate(self._trace.requests):
                prompt = random_prompt(self._options.seed, index, request.input_tokens, self._vocab_size)
                last = None if last_token is None else last_token(prompt, request.output_tokens)
                await asyncio.sleep(request.arrival_s - self.now_s())
                record = self._begin(index, request, prompt)
                requests.create_task(self._follow(record, prompt, last), name=record.request_id)

    def _begin(self, index: int, request: TraceRequest, prompt: list[int]) -> BenchRecord:
        record = BenchRecord(
            index=index,
            request_id=f"{self._options.request_id_prefix}-{index}",
            input_tokens=len(prompt),
            wanted_tokens=request.output_tokens,
            planned_s=request.arrival_s,
            submit_s=self.now_s(),
        )
        if self._options.record_tokens:
            record.prompt_token_ids = prompt
        self._records.append(record)
        self.progress.sent_count += 1
        self._tell()
        return record

    async def _follow(self, record: BenchRecord, prompt: list[int], last_token: int | None) -> None:
        """Read one stream to its end and record the outcome."""
        try:
            wanted, deadline_s = record.wanted_tokens, self._options.deadline_s
            stream = self._target.generate(record.request_id, prompt, wanted, deadline_s, last_token)
            async for token_ids in stream:
                record.token_times_s.extend([self.now_s()] * len(token_ids))
                self.progress.token_count += len(token_ids)
                if self._options.record_tokens:
                    record.output_token_ids.extend(token_ids)
            record.outcome = RequestOutcome.FINISHED
            if record.output_tokens != record.wanted_tokens:
                record.outcome = RequestOutcome.FAILED
                record.error = f"ended with {record.output_tokens} tokens instead of {record.wanted_tokens}"
        except Overloaded as error:
            record.outcome, record.error = RequestOutcome.REFUSED, str(error)
        except DeadlineExceeded as error:
            record.outcome, record.error = RequestOutcome.DEADLINE, str(error)
        except BallastError as error:
            record.outcome, record.error = RequestOutcome.FAILED, f"{type(error).__name__}: {error}"
        finally:
            record.end_s = self.now_s()
            self._count(record.outcome)

    def _count(self, outcome: RequestOutcome) -> None:
        self.progress.finished_count += outcome is RequestOutcome.FINISHED
        self.progress.refused_count += outcome is RequestOutcome.REFUSED
        self.progress.failed_count += outcome not in (RequestOutcome.FINISHED, RequestOutcome.REFUSED)
        self._tell()

    async def _watch(self) -> None:
        while True:
            try:
                sample = await self._target.sample()
                self._samples.append(replace(sample, at_s=self.now_s()))
            except BallastError:
                self._failed_sample_count += 1
            self._tell()
            await asyncio.sleep(_STATUS_INTERVAL_S)

    def _tell(self) -> None:
        self.progress.elapsed_s = self.now_s()
        self._on_progress(self.progress)


def random_prompt(seed: int, index: int, token_count: int, vocab_size: int) -> list[int]:
    """A prompt of random tokens for request `index`; the same arguments give the same prompt."""
    return np.random.default_rng((seed, index)).integers(vocab_size, size=token_count).tolist()
