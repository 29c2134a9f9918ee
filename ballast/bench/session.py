"""One replay from the trace file to the result: read, scale, run, summarise. Shared by the CLI and the demo."""

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from ballast.bench.environment import describe_environment
from ballast.bench.progress import ProgressDisplay
from ballast.bench.records import ReplayRun, TimedTransition
from ballast.bench.replay import Progress, Replay, ReplayOptions
from ballast.bench.results import BenchConfig, BenchResult, ModelFacts, TraceInfo, policy_result
from ballast.bench.stages import bubble_fraction, stage_seconds
from ballast.bench.target import ClusterTarget
from ballast.bench.traces import Trace, read_trace
from ballast.bench.transitions import transitions_or_why
from ballast.client import AsyncClient
from ballast.common.model import ModelInfo

ClusterSettings = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """What to replay, and how. `policy` is the overload policy that the cluster was started with."""

    trace: Path | Trace  # a file, or what was made of one
    time_scale: float = 1.0
    length_scale: float = 1.0
    limit: int | None = None
    options: ReplayOptions = field(default_factory=ReplayOptions)
    policy: str = "recompute"


async def replay_on(
    address: str,
    job: ReplayJob,
    console: Console,
    cluster: ClusterSettings | None = None,
    *,
    planner: str | None = None,
    display: Callable[[Progress], None] | None = None,
) -> BenchResult:
    """Replay on the dispatchers at `address` (host:port, several with commas). Ctrl-C ends it early: complete = False.

    Args:
        cluster: Settings of the cluster worth writing down.
        planner: host:port of the active planner, which is asked for the transitions of the run.
        display: Is told how far the replay has come; None: a bar on `console`.

    Raises:
        ConfigError: the trace cannot be read or a scale makes no sense.
        Unavailable: nobody serves there.
    """
    whole = read_trace(job.trace) if isinstance(job.trace, Path) else job.trace
    options = replace(job.options, request_id_prefix=f"replay-{secrets.token_hex(4)}")  # two at once do not collide
    async with AsyncClient(address) as client:
        target = ClusterTarget(client)
        model = await target.model()
        trace = whole.scaled(
            time_scale=job.time_scale,
            length_scale=job.length_scale,
            limit=job.limit,
            max_total_tokens=model.max_model_len,
        )
        with contextlib.ExitStack() as shown:
            on_progress = display or shown.enter_context(ProgressDisplay(console))
            replay = Replay(target, trace, options, model.vocab_size, on_progress)
            shown.enter_context(_interrupted_by_ctrl_c(replay))
            before = await stage_seconds(client)
            run = await replay.run()
            run.bubble_fraction = bubble_fraction(before, await stage_seconds(client))
        if planner is not None:
            run.transitions = await _transitions(planner, replay, console)
    return _result(address, job, trace, model, run, dict(cluster or {}))


async def _transitions(planner: str, replay: Replay, console: Console) -> list[TimedTransition]:
    """Those that were under way since the first request. Without them a result is still a result."""
    told, why = await transitions_or_why(planner)
    if why:
        console.print(f"transitions are only what was seen from outside: {why}", style="yellow")
    now_s = replay.now_s()
    timed = [TimedTransition(now_s - transition.age_s, transition) for transition in told]
    return [one for one in timed if one.at_s + one.told.duration_s >= 0.0]


@contextlib.contextmanager
def _interrupted_by_ctrl_c(replay: Replay) -> Generator[None]:
    """The first Ctrl-C stops the replay, the next one does what it always does."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        replay.stop()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _result(
    address: str,
    job: ReplayJob,
    trace: Trace,
    model: ModelInfo,
    run: ReplayRun,
    cluster: dict[str, str | int | float | bool | None],
) -> BenchResult:
    return BenchResult(
        created_unix_s=time.time(),
        complete=run.complete,
        config=BenchConfig(seed=job.options.seed, deadline_s=job.options.deadline_s, address=address, cluster=cluster),
        environment=describe_environment(),
        model=ModelFacts(
            name=model.name,
            architecture=model.architecture,
            dtype=model.dtype,
            parameter_count=model.parameter_count,
            kv_bytes_per_token=model.kv_bytes_per_token,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        ),
        trace=TraceInfo.of(trace, time_scale=job.time_scale, length_scale=job.length_scale, limit=job.limit),
        policies={job.policy: policy_result(run, job.policy)},
    )
