"""One replay from trace file to result: reads, scales, runs, summarises. The command line and the demo use it."""

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from ballast.client import AsyncClient
from ballast.common.errors import BallastError
from ballast.common.model import ModelInfo
from tools.bench.environment import describe_environment
from tools.bench.progress import ProgressDisplay
from tools.bench.records import ReplayRun, TimedTransition
from tools.bench.replay import Replay, ReplayOptions, ReplayProgress
from tools.bench.results import BenchConfig, BenchResult, ModelFacts, TraceInfo, policy_result
from tools.bench.stages import bubble_fraction, stage_seconds
from tools.bench.target import ClusterTarget
from tools.bench.traces import Trace, read_trace
from tools.bench.transitions import PlannerSays, PlannerTransition, ask_planner

_UNKNOWN_POLICY = "unknown"  # name of the policy if the planner does not answer

ClusterSettings = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """A trace to replay, and how. `policy`: the cluster's overload policy; None: the planner is asked for it."""

    trace: Path | Trace  # a file, or a trace derived from one
    time_scale: float = 1.0
    length_scale: float = 1.0
    limit: int | None = None
    options: ReplayOptions = field(default_factory=ReplayOptions)
    policy: str | None = None


async def replay_on(
    address: str,
    job: ReplayJob,
    console: Console,
    cluster: ClusterSettings | None = None,
    *,
    planner: str | None = None,
    display: Callable[[ReplayProgress], None] | None = None,
) -> BenchResult:
    """Replay on the dispatchers at `address` (host:port, comma-separated). Ctrl-C ends the replay early; the result is
    then not complete.

    Args:
        cluster: Settings of the cluster to store in the result.
        planner: host:port of the active planner, which is asked for its policy and the transitions of the run; None:
            it is asked through the dispatchers.
        display: Called with the progress of the replay; None: a bar on `console`.

    Raises:
        ConfigError: the trace cannot be read, or a scale is invalid.
        Unavailable: no dispatcher answers at `address`.
    """
    whole = read_trace(job.trace) if isinstance(job.trace, Path) else job.trace
    options = replace(job.options, request_id_prefix=f"replay-{secrets.token_hex(4)}")  # unique among replays
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
        told = await _ask_planner(planner or address.split(",")[0], console)
        run.transitions = _timed(told.transitions, replay.now_s())
    named = replace(job, policy=job.policy or told.overload_policy or _UNKNOWN_POLICY)
    return _result(address, named, trace, model, run, dict(cluster or {}))


async def _ask_planner(address: str, console: Console) -> PlannerSays:
    """Ask the planner for its policy and transitions. If it does not answer, print a warning and return none."""
    try:
        return await ask_planner(address)
    except BallastError as error:
        console.print(f"transitions are only what was seen from outside: {error}", style="yellow")
        return PlannerSays("")


def _timed(told: Sequence[PlannerTransition], now_s: float) -> list[TimedTransition]:
    """The transitions that ended after the replay's time zero, with their start times."""
    timed = [TimedTransition(now_s - transition.age_s, transition) for transition in told]
    return [one for one in timed if one.at_s + one.told.duration_s >= 0.0]


@contextlib.contextmanager
def _interrupted_by_ctrl_c(replay: Replay) -> Generator[None]:
    """Context manager in which the first Ctrl-C stops the replay, and the second has its usual effect."""
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
    policy = job.policy or _UNKNOWN_POLICY
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
        policies={policy: policy_result(run, policy)},
    )
