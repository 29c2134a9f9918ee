"""Every overload policy, on a real cluster whose KV is far too small for the load: no token changes (I2)."""

import asyncio
from pathlib import Path

import pytest

from ballast.client import AsyncClient
from ballast.common.sampling import SamplingParams
from tests.support.cluster import idle, running_cluster, until
from tests.support.reference import reference_greedy_batch
from tools.model.tiny import make_tiny

COUNT = 48
PROMPTS = [[3 + i, 9, 4 + 2 * i, 7] * (2 + i % 5) for i in range(COUNT)]
MAX_TOKENS = [70 + 3 * i % 50 for i in range(COUNT)]
ROUNDS = 12
AMPLE_BYTES, TIGHT_BYTES = 48 << 20, 7 << 19
Tokens = list[tuple[int, ...]]


def sampling(i: int) -> SamplingParams:
    return SamplingParams(temperature=float(i % 2), seed=i, max_tokens=MAX_TOKENS[i], ignore_eos=True)


async def answers(client: AsyncClient) -> Tokens:
    """The tokens of all requests, sent at once."""
    asked = [client.generate(token_ids=PROMPTS[i], sampling=sampling(i), deadline_s=90) for i in range(COUNT)]
    return [answer.token_ids for answer in await asyncio.gather(*asked)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", max_len=256)


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> Tokens:
    """The tokens generated with ample memory. Greedy ones are checked against `transformers`."""
    flags = {"worker": ["--dtype", "float64"], "planner": ["--overload-policy", "recompute"]}
    with running_cluster(model, workers=1, device_memory_bytes=AMPLE_BYTES, flags=flags) as cluster:

        async def story() -> Tokens:
            async with AsyncClient(cluster.cluster.address) as client:
                return await answers(client)

        tokens = cluster.run(story())
    greedy = range(0, COUNT, 2)
    reference = reference_greedy_batch(model, [PROMPTS[i] for i in greedy], [MAX_TOKENS[i] for i in greedy], "float64")
    assert [tokens[i] for i in greedy] == [one.token_ids for one in reference]
    return tokens


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("policy", "worker_flags", "planner_flags"),
    [
        ("recompute", [], []),
        ("recompute", ["--dev", "admission_reserve_fraction=0.2", "--dev", "async_scheduling=on"], []),
        ("swap", ["--dev", "swap_blocks_per_step=2"], []),
        ("migrate", [], ["--dev", "migrate_below_tokens=60", "--dev", "migrate_above_tokens=70"]),
        ("static-pipeline", ["--dev", "microbatching=token-count"], ["--pipeline-degree", "2"]),
        ("drop", ["--fallback-policy", "swap"], ["--restore", "off"]),
    ],
)
def test_no_token_changes(
    model: Path, undisturbed: Tokens, policy: str, worker_flags: list[str], planner_flags: list[str]
) -> None:
    flags = {
        "worker": ["--dtype", "float64", "--overload-policy", policy, *worker_flags],
        "planner": ["--overload-policy", policy, *planner_flags],
    }
    environ = {"BALLAST_MONITOR__DWELL_S": "1"}
    with running_cluster(model, workers=2, device_memory_bytes=TIGHT_BYTES, flags=flags, environ=environ) as cluster:

        async def story() -> None:
            async with AsyncClient(cluster.cluster.address) as client:
                if policy == "static-pipeline":
                    await until(client, lambda now: [len(group.members) for group in now.groups] == [2])
                for _ in range(ROUNDS):  # the monitor acts only after it has observed the load for a while
                    assert await answers(client) == undisturbed
                    status = await until(client, idle)
                    loads = [group.load for group in status.groups if group.load is not None]
                    sizes = [len(group.members) for group in status.groups]
                    if policy in ("recompute", "swap"):
                        assert sizes == [1, 1]
                        if sum(load.preemptions_total for load in loads):
                            return
                    elif policy == "migrate":
                        assert sizes == [1, 1]
                        logs = [path.read_text() for path in cluster.cluster.log_dir.glob("worker-*.log")]
                        if any(" migrated " in log for log in logs):
                            return
                    elif sizes == [2]:
                        return
                raise AssertionError(f"the policy did not act in {ROUNDS} rounds")

        cluster.run(story())
