"""From a scenario to what is simulated."""

from pathlib import Path

from ballast.bench.lengths import lengths_of, with_lengths
from ballast.bench.traces import Trace, read_trace
from ballast.bench.upscale import raised_burst, repeated_burst, upscaled
from ballast.common.errors import ConfigError
from sim.faults import Fault
from sim.hardware import find_cluster, find_model
from sim.jobs.arrivals import generated
from sim.jobs.simulation import SimJob, WorkerSize
from sim.scenario import Scenario

_BURST_WINDOW_S = 30.0


def job_of(scenario: Scenario, *, check_every: int = 0) -> SimJob:
    """
    Raises:
        ConfigError: something is missing, unknown or does not fit together.
    """
    model, cluster = find_model(scenario.model), find_cluster(scenario.cluster)
    if scenario.network_gbps is not None:
        gpu = cluster.gpu.model_copy(update={"nic_bytes_per_s": scenario.network_gbps * 1e9 / 8})
        cluster = cluster.model_copy(update={"gpu": gpu})
    if not scenario.policies:
        raise ConfigError("--policy", "names none")
    return SimJob(
        trace=trace_of(scenario, model.max_model_len),
        model=model,
        cluster=cluster,
        policies=scenario.policies,
        seed=scenario.seed,
        deadline_s=scenario.deadline_s,
        worker=WorkerSize(
            block_tokens=scenario.block_size,
            max_running_count=scenario.max_num_seqs,
            max_batch_tokens=scenario.max_num_batched_tokens,
            lookahead=scenario.microbatching == "lookahead",
        ),
        check_every=check_every,
        faults=[Fault(**fault.model_dump()) for fault in scenario.faults],
        stop_after_s=scenario.stop_after_s,
        time_scale=scenario.time_scale,
        length_scale=scenario.length_scale,
        limit=scenario.limit,
    )


def trace_of(scenario: Scenario, max_model_len: int) -> Trace:
    """
    Raises:
        ConfigError: the scenario has neither a trace nor arrivals, or they cannot be read.
    """
    if scenario.trace is not None:
        trace = upscaled(read_trace(Path(scenario.trace)), scenario.rate_scale, scenario.seed)
        if scenario.lengths is not None:
            trace = with_lengths(trace, lengths_of(scenario.lengths), scenario.seed)
    elif scenario.arrivals is not None:
        spec = scenario.arrivals
        spec = spec.model_copy(update={"rate_per_s": spec.rate_per_s * scenario.rate_scale})
        trace = generated(spec, scenario.lengths, scenario.seed)
    else:
        raise ConfigError("--trace", f"is missing: the scenario names none ({scenario.source or 'see its file'})")
    trace = raised_burst(trace, _BURST_WINDOW_S, scenario.burst_scale, scenario.seed)
    if scenario.repeat_burst is not None:
        trace = repeated_burst(trace, scenario.repeat_burst.window_s, scenario.repeat_burst.times)
    return trace.scaled(
        time_scale=scenario.time_scale,
        length_scale=scenario.length_scale,
        limit=scenario.limit,
        max_total_tokens=max_model_len,
    )
