import contextlib

import pytest

from ballast.common.errors import ConfigError, Unavailable
from ballast.common.ids import WorkerId
from services.worker.store import StoredGpu, claimed_device, claimed_devices

GPUS = [StoredGpu("cuda:0", "GPU-a"), StoredGpu("cuda:1", "GPU-b")]


class Leases:
    def __init__(self) -> None:
        self.holders: dict[str, str] = {}
        self.silent = 0  # calls that will still fail

    async def acquire_lease(self, name: str, holder: str, ttl_s: float, address: str) -> int | None:
        if self.silent:
            self.silent -= 1
            raise Unavailable("state server", "no answer")
        return 1 if self.holders.setdefault(name, holder) == holder else None

    async def release_lease(self, name: str, holder: str) -> None:
        assert self.holders.pop(name) == holder


async def test_each_worker_gets_its_own_gpu_and_a_surplus_worker_is_refused() -> None:
    leases = Leases()
    async with contextlib.AsyncExitStack() as stack:
        claims = [claimed_device("cuda:auto", lambda: GPUS, leases, WorkerId(f"w{i}")) for i in range(3)]
        assert [await stack.enter_async_context(claim) for claim in claims[:2]] == ["cuda:0", "cuda:1"]
        with pytest.raises(ConfigError, match="other workers have claimed all 2 GPUs"):
            await stack.enter_async_context(claims[2])
    assert leases.holders == {}


async def test_a_worker_restarted_before_its_lease_expires_gets_its_gpu_again() -> None:
    leases = Leases()
    leases.holders = {"gpu:GPU-a": "w0", "gpu:GPU-b": "w1"}
    async with claimed_device("cuda:auto", lambda: GPUS, leases, WorkerId("w1")) as device:
        assert device == "cuda:1"


async def test_a_gpu_is_released_at_the_end_and_after_a_failed_load() -> None:
    leases = Leases()
    leases.silent = 1
    with contextlib.suppress(RuntimeError):
        async with claimed_device("cuda:auto", lambda: GPUS, leases, WorkerId("w0")) as device:
            assert (device, leases.holders) == ("cuda:0", {"gpu:GPU-a": "w0"})
            raise RuntimeError("no memory")
    assert leases.holders == {}


async def test_a_state_server_that_never_answers_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.store._ANSWER_WITHIN_S", 0.0)
    leases = Leases()
    leases.silent = 1_000
    with pytest.raises(Unavailable, match="no answer"):
        async with claimed_device("cuda:auto", lambda: GPUS, leases, WorkerId("w0")):
            pass
    assert leases.silent == 999


async def test_an_instance_of_several_ranks_gets_a_gpu_for_each() -> None:
    leases, gpus = Leases(), [*GPUS, StoredGpu("cuda:2", "GPU-c")]
    async with claimed_devices("cuda:auto", 2, lambda: gpus, leases, WorkerId("w0")) as devices:
        assert devices == ("cuda:0", "cuda:1")
        assert set(leases.holders.values()) == {"w0"}
        with pytest.raises(ConfigError, match="other workers have claimed all"):
            async with claimed_devices("cuda:auto", 2, lambda: gpus, leases, WorkerId("w1")):
                pass
        assert sorted(leases.holders) == ["gpu:GPU-a", "gpu:GPU-b"]  # the third lease was released
    assert leases.holders == {}


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [("cpu", ("cpu", "cpu")), ("cuda", ("cuda:0", "cuda:1")), ("cuda:2", ("cuda:2", "cuda:3"))],
)
async def test_ranks_use_consecutive_devices_from_the_named_one(wanted: str, devices: tuple[str, ...]) -> None:
    async with claimed_devices(wanted, 2, list, Leases(), WorkerId("w0")) as given:
        assert given == devices


async def test_a_named_device_needs_no_claim() -> None:
    for device in ("cpu", "cuda", "cuda:3"):
        async with claimed_device(device, list, Leases(), WorkerId("w0")) as given:
            assert given == device
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        async with claimed_device("cuda:auto", list, Leases(), WorkerId("w0")):
            pass
