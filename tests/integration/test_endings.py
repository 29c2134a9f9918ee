"""However requests end, they leave no resources behind: memory and counters return to their initial values (I3, I6)."""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ballast.client import AsyncClient
from ballast.client.types import WorkerStatus
from ballast.common.errors import BallastError, Cancelled, DeadlineExceeded, InvalidRequest
from ballast.common.load import MemoryReport
from ballast.common.sampling import FinishReason, SamplingParams
from tests.support.cluster import RunningCluster, idle, running_cluster, until
from tools.model.tiny import make_tiny

VOCAB = 512
REQUESTS = 1000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    model = make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", vocab=VOCAB, max_len=512)
    flags = {"dispatcher": ["--max-num-queued-reqs", "2000"], "worker": ["--max-num-seqs", "16"]}
    with running_cluster(Path(model), workers=2, dispatchers=2, device_memory_bytes=4 << 20, flags=flags) as cluster:
        yield cluster


def sizes(worker: WorkerStatus) -> tuple[MemoryReport, int] | None:
    """The values that must return to their initial state. Also checks that the byte counts add up."""
    if worker.load is None:
        return None
    worker.load.memory.check()
    return worker.load.memory, worker.load.block_count


def prompt(rng: random.Random, longest: int = 120) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))]


async def finish(client: AsyncClient, rng: random.Random) -> str:
    sampling = SamplingParams(temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 30), ignore_eos=True)
    answer = await client.generate(token_ids=prompt(rng), sampling=sampling)
    assert len(answer.token_ids) == sampling.max_tokens
    return answer.finish_reason


async def stop(client: AsyncClient, rng: random.Random) -> str:
    """Stops at the first token of a stop set so large that such a token is soon generated."""
    sampling = SamplingParams(max_tokens=200, stop_token_ids=tuple(range(3, 131)), ignore_eos=True)
    return (await client.generate(token_ids=prompt(rng), sampling=sampling)).finish_reason


async def cancel_at_once(client: AsyncClient, rng: random.Random) -> str:
    task = asyncio.ensure_future(client.generate(token_ids=prompt(rng, 400), sampling=SamplingParams(max_tokens=50)))
    await asyncio.sleep(rng.random() * 0.02)  # cancelled in the backlog, in flight or during prefill
    if not task.cancel():  # this process was delayed so long that the answer has arrived
        return "too late to leave"
    with pytest.raises(asyncio.CancelledError):
        await task
    return "left early"


async def leave_while_decoding(client: AsyncClient, rng: random.Random) -> str:
    left_after = rng.randint(1, 10)
    async with client.stream(token_ids=prompt(rng), sampling=SamplingParams(max_tokens=300, ignore_eos=True)) as stream:
        got = 0
        async for chunk in stream:
            got += len(chunk.token_ids)
            if got >= left_after:
                return "left while decoding"
    raise AssertionError("300 tokens arrived before the 10th")


async def cancel_by_id(client: AsyncClient, rng: random.Random) -> str:
    stream = client.stream(token_ids=prompt(rng), sampling=SamplingParams(max_tokens=390, ignore_eos=True))
    await anext(stream)
    if not await client.cancel(stream.request_id):  # this process was delayed so long that all tokens have arrived
        assert [chunk.finish_reason async for chunk in stream][-1] is FinishReason.LENGTH
        return "too late to cancel"
    with pytest.raises(Cancelled):
        async for _ in stream:
            pass
    return FinishReason.CANCELLED


async def miss_deadline(client: AsyncClient, rng: random.Random) -> str:
    sampling = SamplingParams(max_tokens=390, ignore_eos=True)
    with pytest.raises(DeadlineExceeded):
        await client.generate(token_ids=prompt(rng), sampling=sampling, deadline_s=rng.uniform(0.005, 0.05))
    return FinishReason.DEADLINE


async def be_invalid(client: AsyncClient, rng: random.Random) -> str:
    wrong = rng.choice([[], [VOCAB], [-1], [5] * 600])
    with pytest.raises(InvalidRequest):
        await client.generate(token_ids=wrong)
    return "invalid"


WAYS = (finish, stop, cancel_at_once, leave_while_decoding, cancel_by_id, miss_deadline, be_invalid)


def test_a_thousand_requests_end_in_every_way_and_leave_nothing(running: RunningCluster) -> None:
    async def story() -> None:
        rng = random.Random(1)
        async with AsyncClient(running.cluster.addresses) as client:
            before = await until(client, lambda s: len(s.workers) == 2 and idle(s))
            gate = asyncio.Semaphore(60)
            endings: Counter[str] = Counter()

            async def one(i: int) -> None:
                async with gate:
                    try:
                        endings[await WAYS[i % len(WAYS)](client, random.Random(rng.random()))] += 1
                    except BallastError as error:
                        raise AssertionError(f"{WAYS[i % len(WAYS)].__name__}: {error!r}") from error

            async with asyncio.TaskGroup() as tasks:
                for i in range(REQUESTS):
                    tasks.create_task(one(i))
            assert endings.total() == REQUESTS
            assert endings[FinishReason.CANCELLED] > 0
            # This load may have caused a drop, so the parameters are restored first.
            at_first = [sizes(worker) for worker in before.workers]
            for address in running.cluster.addresses:
                async with AsyncClient(address) as one_dispatcher:
                    await until(
                        one_dispatcher,
                        lambda s: idle(s) and [sizes(worker) for worker in s.workers] == at_first,
                        within_s=90.0,
                    )

    running.run(story())


def test_a_killed_client_frees_its_blocks(running: RunningCluster, tmp_path: Path) -> None:
    """A killed client sends no cancellation, so the broken connection must suffice."""

    async def story() -> None:
        code = (
            "import asyncio\n"
            "from ballast.client import AsyncClient\n"
            "from ballast.common.sampling import SamplingParams\n"
            "async def main():\n"
            f"    async with AsyncClient({running.cluster.address!r}) as client:\n"
            "        async def one(i):\n"
            "            async for chunk in client.stream(token_ids=[5 + i] * 20,\n"
            "                    sampling=SamplingParams(max_tokens=480, ignore_eos=True)):\n"
            "                print('token', flush=True)\n"
            "        await asyncio.gather(*(one(i) for i in range(8)))\n"
            "asyncio.run(main())\n"
        )
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        assert child.stdout is not None
        for _ in range(8):
            assert await child.stdout.readline() == b"token\n"
        child.kill()
        await child.wait()
        async with AsyncClient(running.cluster.address) as client:
            await until(client, idle)

    running.run(story())
