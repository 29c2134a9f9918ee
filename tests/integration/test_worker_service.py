"""The worker's gRPC service with a real server, a real engine and a dispatcher controlled by the test."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from ballast.common.errors import (
    InvalidRequest,
    InvariantViolation,
    Overloaded,
    PeerViolation,
    StaleEpoch,
    Unavailable,
)
from ballast.common.ids import Incarnation, WorkerId
from ballast.common.model import ModelInfo
from ballast.common.sampling import FinishReason, Grammar, GrammarKind, SamplingParams
from ballast.rpc.channel import open_channel
from ballast.rpc.codec import SAMPLING
from ballast.rpc.errors import from_rpc_error
from ballast.rpc.fencing import MAX_TOKEN, PLANNER_TOKEN, with_token
from ballast.rpc.server import RpcServer
from ballast.service.grammar import Grammars
from ballast.service.tokenizer import load_tokenizer
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.worker.v1 import worker_pb2 as pb
from ballastpb.worker.v1 import worker_pb2_grpc
from services.worker import output_stream
from services.worker import servicer as servicer_module
from services.worker.engine import load as loading
from services.worker.pipeline.stage_clock import StageClock
from services.worker.servicer import WorkerIdentity, WorkerServicer
from services.worker.text import primed_detokenizer
from tests.support.attached import Attached, hello, status_of, until_idle
from tests.support.shells import running_shell, slow
from tools.model.tiny import make_tiny

WORKER, INCARNATION = WorkerId("w1"), Incarnation(41)
MAX_LEN = 1024
LONG = 900  # tokens: takes more than four seconds
SMALL_WINDOW = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4096),
    ("grpc.use_local_subchannel_pool", 1),
)
MODEL = ModelInfo(
    name="qwen3",
    architecture="qwen3",
    layer_count=2,
    vocab_size=512,
    max_model_len=MAX_LEN,
    dtype="float32",
    parameter_count=1,
    kv_bytes_per_token=1,
    eos_token_ids=(1,),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("model") / "qwen3", layers=2, max_len=MAX_LEN)


@dataclass(frozen=True)
class Served:
    address: str
    channel: grpc.aio.Channel


class Alone:
    """A worker without a data plane. Other tests cover transitions."""

    def prepare(self, request: pb.PrepareRequest) -> None:
        raise Unavailable("data plane", "this worker has none")

    def commit(self, epoch: int) -> None:
        raise Unavailable("data plane", "this worker has none")

    def abort(self, epoch: int, why: str) -> None:
        raise Unavailable("data plane", "this worker has none")

    def migrate(self, request: pb.MigrateRequest) -> None:
        raise Unavailable("data plane", "this worker has none")

    def park(self, incarnation: int, *, park: bool) -> None:
        raise Unavailable("data plane", "this worker has none")

    def name_partners(self, request: pb.NamePartnersRequest) -> int:
        return 0

    def status(self, epoch: int) -> pb.TransitionStatus:
        return pb.TransitionStatus(epoch=epoch)

    async def when_prepared(self, epoch: int) -> pb.TransitionStatus:
        return self.status(epoch)

    async def when_taken_up(self, epoch: int) -> pb.TransitionStatus:
        return self.status(epoch)


@contextlib.asynccontextmanager
async def worker(
    model_dir: Path, compile_grammar: Callable[[Grammar], Future[Any]] | None = None
) -> AsyncGenerator[Served]:
    """A worker with steps of 5 ms, and a channel to it. Any bug that the server reports fails the test."""
    bugs: list[InvariantViolation] = []
    async with running_shell(model_dir, slow) as shell:
        servicer = WorkerServicer(
            shell=shell,
            identity=WorkerIdentity(WORKER, INCARNATION, MODEL),
            max_waiting_count=64,
            detokenizer=functools.partial(primed_detokenizer, load_tokenizer(model_dir)),
            transitions=Alone(),
            clock=StageClock(),
            compile_grammar=compile_grammar,
        )

        def register(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)

        service = pb.DESCRIPTOR.services_by_name["WorkerService"]
        server = RpcServer(host="127.0.0.1", port=0, services=[(service, register)], on_bug=bugs.append)
        port = await server.start()
        try:
            address = f"127.0.0.1:{port}"
            async with open_channel(address) as channel:
                yield Served(address, channel)
        finally:
            await server.stop(1.0)
    assert bugs == []


@pytest.fixture
def served(model: Path) -> AbstractAsyncContextManager[Served]:
    return worker(model)


async def test_a_request_from_hello_to_its_ending(served: Served) -> None:
    attached = await Attached.open(served.channel)
    await attached.submit(1, 100, logprobs=2)
    await attached.submit(2, 10)
    one, two = await attached.ended(1, 2)
    assert one.reason is two.reason is FinishReason.LENGTH
    assert (len(one.token_ids), len(two.token_ids)) == (100, 10)
    assert one.token_ids[:10] == two.token_ids
    assert [(lp.chosen.token_id, len(lp.top)) for lp in one.logprobs] == [(t, 2) for t in one.token_ids]
    assert all(lp.top[0].token_id == lp.chosen.token_id for lp in one.logprobs)
    assert one.text.startswith(two.text.rstrip("\ufffd"))
    assert any(load.running_count == 2 for load in attached.loads)
    for load in attached.loads:
        memory = load.memory
        assert memory.parameter_bytes + memory.kv_bytes + memory.free_bytes == memory.budget_bytes
    await until_idle(served.channel)


async def test_the_first_message_must_be_hello(served: Served) -> None:
    silent = Attached(served.channel)
    await silent.call.done_writing()
    with pytest.raises(PeerViolation, match="first message must be Hello"):
        await silent.read()
    hasty = Attached(served.channel)
    await hasty.call.write(pb.AttachRequest(abort=pb.Abort(handle=1)))
    with pytest.raises(PeerViolation, match="first message must be Hello"):
        await hasty.read()


async def test_hello_must_arrive_in_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "_HELLO_TIMEOUT_S", 0.2)

    with pytest.raises(PeerViolation, match=r"no Hello within 0\.2 s"):
        await Attached(served.channel).read()


async def test_a_hello_to_another_worker_or_incarnation_is_refused(served: Served) -> None:
    lost = Attached(served.channel)
    await lost.call.write(hello("w2", INCARNATION))
    with pytest.raises(Unavailable, match="this is worker w1"):
        await lost.read()
    stale = Attached(served.channel)
    await stale.call.write(hello(WORKER, 40))
    with pytest.raises(StaleEpoch) as caught:
        await stale.read()
    assert (caught.value.have, caught.value.want) == (40, INCARNATION)
    assert await stale.call.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await status_of(served.channel)).dispatcher_count == 0


async def test_a_second_hello_ends_the_stream_and_frees_its_requests(served: Served) -> None:
    attached = await Attached.open(served.channel)
    await attached.submit(1, LONG)
    await attached.started(1)
    await attached.call.write(hello(WORKER, INCARNATION))
    with pytest.raises(PeerViolation, match="hello in the middle"):
        await attached.ended(1)
    await until_idle(served.channel)


def broken_submits() -> dict[str, pb.Submit]:
    params = cluster_pb2.SamplingParams
    fine: dict[str, Any] = {"prompt_token_ids": [5, 6], "sampling": params(temperature=0.0)}
    changes: dict[str, dict[str, Any]] = {
        "temperature": {"sampling": params(temperature=-1.0)},
        "top_p": {"sampling": params(temperature=1.0, top_p=float("nan"))},
        "max_tokens": {"sampling": params(max_tokens=0)},
        "deadline_s": {"deadline_s": float("nan")},
        "priority": {"priority": 77},
        "seed": {"sampling": params(temperature=1.0)},
        "prompt_token_ids: must not be empty": {"prompt_token_ids": []},
        "token id 600 is not in the vocabulary": {"prompt_token_ids": [600]},
        "token id -3 is not in the vocabulary": {"prompt_token_ids": [-3]},
        "must not be empty": {"prompt_token_ids": [], "output_token_ids": [4]},
        "must not be negative": {"prompt_token_ids": [-3], "output_token_ids": [4]},
        "leave no room for an answer": {"prompt_token_ids": [5] * MAX_LEN},
        "delivered_text_chars": {"delivered_text_chars": -1},
    }
    return {why: pb.Submit(handle=i, **(fine | change)) for i, (why, change) in enumerate(changes.items(), 1)}


async def test_malformed_requests_are_answered_and_affect_no_others(served: Served) -> None:
    attached = await Attached.open(served.channel)
    broken = broken_submits()
    for submit in broken.values():
        await attached.send(submit)
    await attached.submit(100, 5)
    for why, submit in broken.items():
        (heard,) = await attached.ended(submit.handle)
        assert heard.reason is FinishReason.ERROR
        assert heard.ending is not None
        assert heard.ending.invalid
        assert why in heard.ending.error
    (good,) = await attached.ended(100)
    assert good.reason is FinishReason.LENGTH
    await until_idle(served.channel)


async def test_abort_and_deadline(served: Served) -> None:
    attached = await Attached.open(served.channel)
    await attached.submit(1, LONG)
    due = cluster_pb2.SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    await attached.send(pb.Submit(handle=2, prompt_token_ids=[5], sampling=due, deadline_s=0.15))
    await attached.started(1)
    await attached.call.write(pb.AttachRequest(abort=pb.Abort(handle=1)))
    first, second = await attached.ended(1, 2)
    assert first.reason is FinishReason.CANCELLED
    assert second.reason is FinishReason.DEADLINE
    await until_idle(served.channel)


@pytest.mark.parametrize("how", ["cancel", "half close", "lost channel"])
async def test_requests_of_a_disconnected_dispatcher_end(served: Served, how: str) -> None:
    other = open_channel(served.address)
    going, staying = await Attached.open(other), await Attached.open(served.channel)
    for handle in range(1, 5):
        await going.submit(handle, LONG)
    await staying.submit(1, 60)
    await going.started(4)
    assert (await status_of(served.channel)).dispatcher_count == 2
    match how:
        case "cancel":
            going.call.cancel()
        case "half close":
            await going.call.done_writing()
        case _:
            await other.close()
    (heard,) = await staying.ended(1)
    assert len(heard.token_ids) == 60
    await until_idle(served.channel)
    await until_dispatchers(served.channel, 1)
    await other.close()


async def until_dispatchers(channel: grpc.aio.Channel, count: int) -> None:
    give_up_at_s = asyncio.get_running_loop().time() + 60
    while (attached := (await status_of(channel)).dispatcher_count) != count:
        assert asyncio.get_running_loop().time() < give_up_at_s, f"{attached} dispatchers are attached"
        await asyncio.sleep(0.01)


async def test_a_dispatcher_that_does_not_read_is_dropped(
    served: Served, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output_stream, "STREAM_OUTPUTS", 20)

    async with grpc.aio.insecure_channel(served.address, options=SMALL_WINDOW) as channel:
        lazy = await Attached.open(channel)
        for handle in range(1, 9):  # with logprobs the answers exceed the transport's buffers
            await lazy.submit(handle, LONG, logprobs=20)
        await until_dispatchers(served.channel, 0)
        await until_idle(served.channel)
        assert "dispatcher detached" in capsys.readouterr().out  # although the socket is full
        assert (await status_of(served.channel)).load.generation_tokens_total < 8 * LONG
        with pytest.raises(Overloaded, match="20 outputs"):
            await lazy.ended(*range(1, 9))


async def test_drain_refuses_new_requests(served: Served) -> None:
    attached = await Attached.open(served.channel)
    await attached.submit(1, 300)
    await attached.started(1)
    answer = await attached.stub.Drain(pb.DrainRequest())
    assert answer.running_request_count == 1
    await attached.submit(2, 40)
    old, new = await attached.ended(1, 2)
    assert len(old.token_ids) == 300
    assert new.ending is not None
    assert new.ending.refused
    assert new.reason is None
    assert (await status_of(served.channel)).load.draining

    # A dispatcher that attaches during a drain is accepted, since a transition may still move requests to this worker.
    # It is notified of the drain.
    another = await Attached.open(served.channel)
    assert another.welcome.load.draining
    await another.submit(1, 40)
    (refused,) = await another.ended(1)
    assert refused.ending is not None
    assert refused.ending.refused


async def test_status_identifies_the_worker(served: Served, model: Path) -> None:
    status = await status_of(served.channel)
    assert (status.worker_id, status.incarnation) == (WORKER, INCARNATION)
    assert status.model.vocab_size == 512
    assert status.load.block_count > 0
    assert status.load.max_running_count == 8


async def test_orders_of_a_replaced_planner_are_refused(served: Served) -> None:
    """Sends each kind of order with a token below the highest one seen; read-only calls succeed nevertheless."""

    stub = worker_pb2_grpc.WorkerServiceStub(served.channel)
    await stub.NamePartners(pb.NamePartnersRequest(), metadata=with_token(7))
    orders = (
        (stub.Prepare, pb.PrepareRequest()),
        (stub.Commit, pb.CommitRequest()),
        (stub.Abort, pb.AbortRequest()),
        (stub.Migrate, pb.MigrateRequest()),
        (stub.NamePartners, pb.NamePartnersRequest()),
        (stub.Drain, pb.DrainRequest()),
    )
    for order, request in orders:
        for old in (with_token(6), ()):
            with pytest.raises(grpc.RpcError) as refused:
                await cast(Any, order)(request, metadata=old)
            why = from_rpc_error(refused.value, WORKER)
            assert isinstance(why, StaleEpoch)
            assert (why.what, why.want) == (PLANNER_TOKEN, 7)
    for nonsense in ("-1", "9" * 17, "x", str(MAX_TOKEN + 1)):
        with pytest.raises(grpc.RpcError) as refused:
            await stub.Drain(pb.DrainRequest(), metadata=((with_token(0)[0][0], nonsense),))
        assert isinstance(from_rpc_error(refused.value, WORKER), InvalidRequest)
    assert (await stub.GetTransition(pb.GetTransitionRequest(epoch=1))).status.epoch == 1
    assert not (await status_of(served.channel)).load.draining
    await stub.Drain(pb.DrainRequest(), metadata=with_token(7))
    assert (await status_of(served.channel)).load.draining


def test_a_grammar_is_compiled_before_the_engine_gets_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling a large grammar takes seconds, during which no other request may wait."""
    made: list[Grammars] = []
    threads: list[str] = []
    compiled = Grammars._compiled  # pyright: ignore[reportPrivateUsage]

    class Watched(Grammars):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

        def _compiled(self, grammar: Grammar) -> Any:
            threads.append(threading.current_thread().name)
            return compiled(self, grammar)

    monkeypatch.setattr(loading, "Grammars", Watched)

    def submit(handle: int, pattern: str) -> pb.Submit:
        grammar = Grammar(GrammarKind.REGEX, pattern)
        sampling = SamplingParams(temperature=0.0, max_tokens=4, grammar=grammar)
        return pb.Submit(handle=handle, prompt_token_ids=(9, 8, 7), sampling=SAMPLING.message(sampling))

    async def story() -> None:
        async with asyncio.timeout(120), worker(model, lambda grammar: made[0].ahead(grammar)) as served:
            attached = await Attached.open(served.channel)
            await attached.send(submit(1, "[a-z]{30}"))
            await attached.send(submit(2, "[a-z]{30}"))
            await attached.send(submit(3, "(["))
            one, two, wrong = await attached.ended(1, 2, 3)
            assert one.token_ids == two.token_ids != []
            assert wrong.reason is FinishReason.ERROR

    asyncio.run(story())
    assert len(threads) == 2
    assert all(thread.startswith("grammars") for thread in threads)


async def test_requests_and_aborts_overtake_requests_whose_grammar_is_being_compiled(model: Path) -> None:
    begun = [Future[None](), Future[None]()]
    left = iter(begun)

    def submit(handle: int) -> pb.Submit:
        sampling = SamplingParams(temperature=0.0, max_tokens=4, grammar=Grammar(GrammarKind.REGEX, "[a-z]{30}"))
        return pb.Submit(handle=handle, prompt_token_ids=(9, 8, 7), sampling=SAMPLING.message(sampling))

    async with asyncio.timeout(60), worker(model, lambda _: next(left)) as served:
        attached = await Attached.open(served.channel)
        await attached.send(submit(1))
        await attached.send(submit(2))
        await attached.submit(3, 10)
        [three] = await attached.ended(3)
        assert len(three.token_ids) == 10
        await attached.call.write(pb.AttachRequest(abort=pb.Abort(handle=2)))
        [two] = await attached.ended(2)
        assert two.reason is FinishReason.CANCELLED
        assert begun[1].cancelled()
        begun[0].set_result(None)
        [one] = await attached.ended(1)
        assert len(one.token_ids) == 4
        await attached.submit(3, 10)  # a reused handle, which the worker ignores
        await attached.submit(4, 1)
        await attached.ended(4)
        assert len(attached.heard[3].token_ids) == 0


async def test_a_request_ends_even_if_the_compiler_of_its_grammar_crashes(model: Path) -> None:
    compiled = Future[None]()
    sampling = SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.REGEX, "[a-z]{30}"))
    async with asyncio.timeout(60), worker(model, lambda _: compiled) as served:
        attached = await Attached.open(served.channel)
        await attached.send(pb.Submit(handle=1, prompt_token_ids=(9, 8, 7), sampling=SAMPLING.message(sampling)))
        compiled.set_exception(RuntimeError("out of stack"))
        [one] = await attached.ended(1)
        assert one.reason is FinishReason.ERROR
        assert one.ending is not None
        assert "RuntimeError: out of stack" in one.ending.error
