"""The scenarios in this repository can be read, and name only existing models, clusters and policies."""

from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from sim.hardware import find_cluster, find_model
from sim.jobs.machines import catalogue_machine, stand_in
from sim.jobs.scenarios import job_of
from sim.policies import find_policy
from sim.scenario import make_scenario, read_scenario
from sim.world import instance_count
from tools.bench.lengths import lengths_of

FOLDER = Path(__file__).parents[3] / "benchmarks" / "scenarios"
FILES = sorted(FOLDER.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenarios_name_existing_things(path: Path) -> None:
    scenario = read_scenario(path)
    assert scenario.description
    assert instance_count(find_model(scenario.model), find_cluster(scenario.cluster)) > 1
    assert all(find_policy(word.split(":")[0]) for word in scenario.policies)
    assert scenario.trace is None or Path(scenario.trace).is_file()
    assert scenario.lengths is None or lengths_of(scenario.lengths)


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 5


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("description: x\nmodel: a\ncluster: b\nrate: 2\n", "rate: unknown setting"),
        ("description: x\nmodel: a\ncluster: b\nlimit: 0\n", "limit: Input should be greater than or equal to 1"),
        ("description: x\nmodel: a\ncluster: b\ntpot_target_s: 0\n", "tpot_target_s: Input should be greater than 0"),
        ("- a\n", "file: Input should be a valid dictionary"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_invalid_values_are_reported_with_their_field(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=told):
        read_scenario(path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_scenario(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("cluster", "given", "expected"),
    [
        ("4xA100-40G", {}, (256, 2048)),
        ("4xH100-80G", {}, (512, 4096)),
        ("2xA100-40G+2xH100-80G", {}, (256, 2048)),
        ("4xH100-80G", {"max_num_seqs": 64, "max_num_batched_tokens": 1024}, (64, 1024)),
    ],
)
def test_limits_per_step_are_the_defaults_of_workers_on_the_gpu(
    cluster: str, given: dict[str, int], expected: tuple[int, int]
) -> None:
    arrivals = {"span_s": 5, "rate_per_s": 1}
    plain = {"description": "", "model": "Llama-2-13B", "cluster": cluster, "lengths": "sharegpt", "arrivals": arrivals}
    size = job_of(make_scenario({**plain, **given})).worker
    assert (size.max_running_count, size.max_batch_tokens) == expected


def test_emulated_workers_have_the_limits_of_workers_on_the_gpu(tmp_path: Path) -> None:
    flags = stand_in(tmp_path, catalogue_machine("H100-80G", "Llama-2-13B", 4096)).worker_flags
    found = [flags[flags.index(name) + 1] for name in ("--max-num-seqs", "--max-num-batched-tokens")]
    assert found == ["512", "4096"]


@pytest.mark.parametrize("burst", [{"burst_scale": 2.0}, {"repeat_burst": {"window_s": 5, "times": 2}}])
def test_a_burst_needs_requests(burst: dict[str, object]) -> None:
    content = {"description": "", "model": "Llama-2-13B", "cluster": "1xA100-40G"}
    arrivals = {"span_s": 25, "rate_per_s": 1e-4}
    with pytest.raises(ConfigError, match="has no request"):
        job_of(make_scenario({**content, "arrivals": arrivals, **burst}))
