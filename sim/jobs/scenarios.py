"""Converts a scenario to a simulation's job."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import cast

from ballast.common.errors import ConfigError
from ballast.common.sampling import PriorityClass
from ballast.service.models import find_model as find_model_folder
from ballast.service.models import hub_name
from sim.faults import Fault
from sim.hardware import Gpu, ModelSpec, find_cluster, find_model
from sim.jobs.arrivals import generated
from sim.jobs.simulation import SimJob, WorkerSize
from sim.offline import OfflineLoad
from sim.scenario import Offline, Scenario
from sim.shapes import spec_of_config, stored_as
from tools.bench.lengths import lengths_of, with_lengths
from tools.bench.traces import Trace, read_trace
from tools.bench.upscale import raised_burst, repeated_burst, upscaled

_BURST_WINDOW_S = 30.0
_OFFLINE_ROWS = 4096  # number of drawn lengths


def job_of(scenario: Scenario, *, check_every: int = 0) -> SimJob:
    """The job of a scenario.

    Raises:
        ConfigError: a field is missing, unknown or inconsistent.
    """
    cluster = find_cluster(scenario.cluster)
    model = stored_as(
        model_of(scenario.model, cluster.gpu), cluster.gpu, scenario.quantization, scenario.kv_cache_dtype
    )
    if scenario.network_gbps is not None:
        card = {"nic_bytes_per_s": scenario.network_gbps * 1e9 / 8}
        first, *others = [k.model_copy(update={"gpu": k.gpu.model_copy(update=card)}) for k in cluster.kinds]
        cluster = first.model_copy(update={"others": tuple(others)})
    if not scenario.policies:
        raise ConfigError("--policy", "names none")
    trace = trace_of(scenario, model.max_model_len)
    priorities_only = scenario.offline is not None and scenario.offline.as_class == "default"
    worker = WorkerSize.of(cluster, sequences=scenario.max_num_seqs, tokens=scenario.max_num_batched_tokens)
    return SimJob(
        trace=trace,
        model=model,
        cluster=cluster,
        policies=scenario.policies,
        seed=scenario.seed,
        deadline_s=scenario.deadline_s,
        worker=replace(
            worker,
            block_tokens=scenario.block_size,
            lookahead=scenario.microbatching == "lookahead",
            tpot_target_s=scenario.tpot_target_s,
        ),
        check_every=check_every,
        faults=[Fault(**fault.model_dump()) for fault in scenario.faults],
        stop_after_s=scenario.stop_after_s,
        time_scale=scenario.time_scale,
        length_scale=scenario.length_scale,
        answer_scale=scenario.answer_scale,
        limit=scenario.limit,
        offline=None if scenario.offline is None else _offline(scenario.offline, trace, model, scenario.seed),
        classes=(PriorityClass.INTERACTIVE if priorities_only else PriorityClass.DEFAULT,),
    )


def _offline(offline: Offline, trace: Trace, model: ModelSpec, seed: int) -> OfflineLoad:
    kind, rng = lengths_of(offline.lengths), random.Random(seed)
    drawn = [kind.draw(rng) for _ in range(_OFFLINE_ROWS)]
    lengths = [(prompt, answer) for prompt, answer in drawn if prompt + answer <= model.max_model_len]
    if not lengths:
        raise ConfigError("--offline", f"{offline.lengths}: no request fits into {model.max_model_len} tokens")
    priority = PriorityClass(offline.as_class)
    return OfflineLoad(lengths=lengths, waiting_count=offline.waiting_count, until_s=trace.span_s, priority=priority)


def model_of(text: str, gpu: Gpu) -> ModelSpec:
    """A model of the catalogue, or of a config.json in a folder or of org/name[@revision] on a hub.

    Raises:
        ConfigError: it is none of these, or of an unsupported kind.
    """
    if hub_name(text) is None and not Path(text).is_dir():
        return find_model(text)
    found = find_model_folder(text, weights=False)
    path = found.folder / "config.json"
    try:
        config: object = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(str(path), "must be a JSON object")
    return spec_of_config(found.name, cast("dict[str, object]", config), gpu)


def trace_of(scenario: Scenario, max_model_len: int) -> Trace:
    """The scenario's trace, read or generated.

    Raises:
        ConfigError: the scenario has neither a trace nor arrivals, or they are invalid.
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
        answer_scale=scenario.answer_scale,
        limit=scenario.limit,
        max_total_tokens=max_model_len,
    )
