"""Real dispatcher processes, real gRPC and a real state server. The workers' engines are timers whose tokens are
known.
"""

import asyncio
import contextlib
import signal
import socket
import time
from pathlib import Path

import grpc
import pytest

from ballast.common import errors
from ballast.rpc.errors import from_rpc_error
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb
from tests.support.dispatchers import Answer, Arena, Dispatcher, request, until, until_async
from tests.support.timed_worker import TimedSettings, TimedWorker, scripted_text, scripted_tokens
from tools.local.state_server import PrivateStateServer
from tools.model.tokenizer import write_tokenizer


async def test_streams_tokens_text_and_usage_in_order() -> None:
    async with Arena(TimedSettings(step_s=0.005)) as arena:
        answer = await arena.dispatcher.generate(request(max_tokens=20, logprobs=0))
        expected = scripted_tokens([1, 2, 3], 7, 20)
        assert answer.error is None
        assert answer.token_ids == expected
        assert answer.text == scripted_text(expected)
        assert [lp.chosen.token_id for r in answer.responses for lp in r.logprobs] == expected
        assert [r.finish_reason for r in answer.responses[:-1]] == [0] * (len(answer.responses) - 1)
        assert answer.last.finish_reason == cluster_pb2.FINISH_REASON_LENGTH
        usage = answer.last.usage
        assert (usage.prompt_token_count, usage.completion_token_count, usage.seed) == (3, 20, 7)
        assert 0 < usage.ttft_s < usage.e2e_s

        collected = await arena.dispatcher.generate(request(max_tokens=20, collect=True, omit_text=True))
        assert (len(collected.responses), collected.token_ids, collected.text) == (1, expected, "")

        unseeded = await arena.dispatcher.generate(request(seed=None))
        seed = unseeded.last.usage.seed
        assert unseeded.token_ids == scripted_tokens([1, 2, 3], seed, 8)
        assert len({r.request_id for r in unseeded.responses}) == 1


async def test_bad_requests_are_refused_by_name_and_affect_no_others() -> None:
    def with_sampling(**values: float) -> pb.GenerateRequest:
        message = request()
        for name, value in values.items():
            setattr(message.sampling, name, value)
        return message

    async with Arena(TimedSettings(max_model_len=64)) as arena:
        cases = {
            "prompt": [
                pb.GenerateRequest(),
                pb.GenerateRequest(token_ids=pb.TokenIds()),
                request([1] * 64),
            ],
            "token_ids[1]": [request([1, 1000]), request([1, -1])],
            "sampling.max_tokens": [request([1] * 60, max_tokens=5), with_sampling(max_tokens=0)],
            "sampling.temperature": [with_sampling(temperature=float("nan")), with_sampling(temperature=-1)],
            "sampling.top_p": [with_sampling(top_p=0)],
            "priority": [request(priority=cluster_pb2.PriorityClass.ValueType(77))],
            "request_id": [request(request_id="x" * 129)],
            "conversation.messages": [pb.GenerateRequest(conversation=pb.Conversation())],
            "conversation": [
                pb.GenerateRequest(conversation=pb.Conversation(messages=[pb.ChatMessage(role="ghost", content="boo")]))
            ],
        }
        for field, messages in cases.items():
            for message in messages:
                answer = await arena.dispatcher.generate(message)
                assert isinstance(answer.error, errors.InvalidRequest), (field, answer.error)
                assert answer.error.field == field
        huge = await arena.dispatcher.generate(pb.GenerateRequest(text="x" * (17 << 20)))
        assert isinstance(huge.error, errors.InvalidRequest)
        assert "larger" in str(huge.error)
        fits = await arena.dispatcher.generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 60), sampling=cluster_pb2.SamplingParams(seed=1))
        )
        assert len(fits.token_ids) == 4  # the default max_tokens is shortened
        said = await arena.dispatcher.generate(
            pb.GenerateRequest(
                conversation=pb.Conversation(messages=[pb.ChatMessage(role="user", content="hi")]),
                sampling=cluster_pb2.SamplingParams(max_tokens=2),
            )
        )
        assert len(said.token_ids) == 2
        assert arena.worker.request_count == 0


async def test_a_disconnected_client_frees_its_kv_at_once() -> None:
    async with Arena(TimedSettings(step_s=0.01)) as arena:
        delays_s: list[float] = []
        while not delays_s or min(delays_s) >= 0.05:  # a machine that is busy all the time would fail here
            assert len(delays_s) < 50, delays_s
            index = len(delays_s)
            call = arena.dispatcher.stub.Generate(request(max_tokens=5000, request_id=f"r{index}"))
            await call.read()
            assert arena.worker.used_blocks > 0
            left_at_s = time.monotonic()
            call.cancel()
            await until(lambda: arena.worker.used_blocks == 0, "the blocks to come back")
            delays_s.append(arena.worker.aborted[-1][1] - left_at_s)
        count = len(delays_s)
        assert [name for name, _ in arena.worker.aborted] == [f"r{index}" for index in range(count)]
        call = arena.dispatcher.stub.Generate(request(max_tokens=5000, request_id="by-id"))
        await call.read()
        assert (await arena.dispatcher.stub.Cancel(pb.CancelRequest(request_id="by-id"))).found
        with contextlib.suppress(grpc.RpcError):  # the status follows the last tokens
            while isinstance(await call.read(), pb.GenerateResponse):
                pass
        assert await call.code() == grpc.StatusCode.CANCELLED
        assert not (await arena.dispatcher.stub.Cancel(pb.CancelRequest(request_id="by-id"))).found
        status = await arena.dispatcher.status()
        assert dict(status.requests_total) == {"cancelled": count + 1}
        assert status.running_request_count == status.backlog_request_count == 0


async def test_a_deadline_ends_the_request_on_both_sides() -> None:
    async with Arena(TimedSettings(step_s=0.01)) as arena:
        begin_s = time.monotonic()
        answer = await arena.dispatcher.generate(request(max_tokens=5000), timeout_s=1.0)
        assert isinstance(answer.error, errors.DeadlineExceeded)
        assert 0.8 < time.monotonic() - begin_s < 40.0, "generating all tokens would take 50 s"
        assert answer.token_ids == scripted_tokens([1, 2, 3], 7, len(answer.token_ids))
        await until(lambda: arena.worker.request_count == 0, "the worker to forget it")

        async def counted() -> bool:
            # On a busy machine the client's own deadline may expire a moment earlier and cancel the request.
            return dict((await arena.dispatcher.status()).requests_total) in ({"deadline": 1}, {"cancelled": 1})

        await until_async(counted, "the deadline to be counted")


async def test_a_killed_worker_costs_no_token() -> None:
    async with Arena(TimedSettings(worker_id="w0"), TimedSettings(worker_id="w1")) as arena:
        prompts = [[1, 2, index] for index in range(40)]
        heard = [Answer() for _ in prompts]
        calls = [
            asyncio.create_task(arena.dispatcher.generate(request(p, max_tokens=150), answer=one))
            for p, one in zip(prompts, heard, strict=True)
        ]
        await until(lambda: all(len(one.token_ids) > 3 for one in heard), "all to run")
        doomed = arena.workers[0].request_count  # requests that have already ended are not replayed
        await arena.workers[0].stop()
        answers = await asyncio.gather(*calls)
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = scripted_tokens(prompt, 7, 150)
            assert answer.error is None
            assert answer.token_ids == expected
            assert answer.text == scripted_text(expected)
        resumed = [s for s in arena.workers[1].submitted if s.attempt == 2]
        replay_count = sum(answer.last.usage.replay_count for answer in answers)
        assert len(resumed) == replay_count >= doomed > 0
        assert any(s.output_token_ids and s.delivered_text_chars for s in resumed)


async def test_a_restarted_worker_is_treated_as_a_new_one() -> None:
    async with Arena(TimedSettings(step_s=0.01)) as arena:
        call = asyncio.create_task(arena.dispatcher.generate(request(max_tokens=60)))
        await until(lambda: arena.worker.used_blocks > 0, "the request to run")
        await arena.worker.stop()
        await asyncio.sleep(0.2)
        async with TimedWorker(TimedSettings(step_s=0.01, incarnation=2)) as reborn:
            arena.publish(reborn.member())
            answer = await call
            assert answer.error is None
            assert answer.token_ids == scripted_tokens([1, 2, 3], 7, 60)
            assert answer.last.usage.replay_count == 1


async def test_two_dispatchers_share_the_workers_and_keep_ids_apart() -> None:
    settings = [TimedSettings(worker_id=f"w{i}", step_s=0.005, max_running=8, block_count=64) for i in range(2)]
    async with Arena(*settings, dispatchers=2) as arena:
        d0, d1 = arena.dispatchers
        prompts = [[5, index] for index in range(120)]
        answers = await asyncio.gather(
            *(arena.dispatchers[i % 2].generate(request(p, max_tokens=20)) for i, p in enumerate(prompts))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.error is None
            assert answer.token_ids == scripted_tokens(prompt, 7, 20)
        assert min(len(worker.submitted) for worker in arena.workers) >= 30

        call = d0.stub.Generate(request(max_tokens=4000, request_id="mine"))
        await call.read()
        twin = await d1.generate(request(request_id="mine"))
        assert isinstance(twin.error, errors.AlreadyExists)
        same = await d0.generate(request(request_id="mine"))
        assert isinstance(same.error, errors.AlreadyExists)
        # Refusing the duplicate did not release the claim of the running request.
        await asyncio.sleep(0.3)
        again = await d1.generate(request(request_id="mine"))
        assert isinstance(again.error, errors.AlreadyExists)
        call.cancel()

        async def is_free() -> bool:
            return (await d1.generate(request(request_id="mine"))).error is None

        await until_async(is_free, "the id to be free again")
        # A dead dispatcher's claim expires, since its clients retry at another dispatcher.
        call = d0.stub.Generate(request(max_tokens=4000, request_id="orphan"))
        await call.read()
        d0.process.send_signal(signal.SIGKILL)

        async def is_taken_over() -> bool:
            return (await d1.generate(request(request_id="orphan"))).error is None

        await until_async(is_taken_over, "the dead dispatcher's claim to lapse")


async def test_serving_continues_without_the_state_server() -> None:
    async with Arena(TimedSettings(step_s=0.005)) as arena:
        arena.state.stop()
        answers = await asyncio.gather(*(arena.dispatcher.generate(request(request_id=f"r{i}")) for i in range(5)))
        assert [answer.error for answer in answers] == [None] * 5

        async def says(reachable: bool) -> bool:
            return (await arena.dispatcher.status()).state_server_reachable is reachable

        await until_async(lambda: says(False), "the loss to be noticed")
        arena.state.restart()  # without data; the last known layout remains in force
        await until_async(lambda: says(True), "the state server to be found again")
        assert (await arena.dispatcher.generate(request())).error is None
        async with TimedWorker(TimedSettings(worker_id="w9")) as newcomer:
            arena.epoch = 0  # as if the planner had restarted, too
            arena.publish(newcomer.member())
            await arena.connected(newcomer)
            assert (await arena.dispatcher.generate(request())).error is None
            assert len(newcomer.submitted) == 1


async def test_sigterm_finishes_running_requests_refuses_new_ones_and_exits_0() -> None:
    async with Arena(TimedSettings(step_s=0.01)) as arena:
        dispatcher = arena.dispatcher
        running = asyncio.create_task(dispatcher.generate(request(max_tokens=100)))
        await until(lambda: arena.worker.used_blocks > 0, "the request to run")
        dispatcher.process.send_signal(signal.SIGTERM)

        async def not_ready() -> bool:
            return not await dispatcher.is_ready()

        await until_async(not_ready, "NOT_SERVING")
        late = await dispatcher.generate(request())
        assert isinstance(late.error, errors.Unavailable)
        answer = await running
        assert answer.error is None
        assert answer.token_ids == scripted_tokens([1, 2, 3], 7, 100)
        await until(lambda: dispatcher.process.returncode is not None, "the process to end")
        assert dispatcher.process.returncode == 0


async def test_requests_beyond_the_shutdown_timeout_end_with_a_reason() -> None:
    async with Arena(TimedSettings(step_s=0.01), flags=["--shutdown-timeout", "0.3"]) as arena:
        running = asyncio.create_task(arena.dispatcher.generate(request(max_tokens=5000)))
        await until(lambda: arena.worker.used_blocks > 0, "the request to run")
        arena.dispatcher.process.send_signal(signal.SIGTERM)
        assert isinstance((await running).error, errors.Unavailable)
        await until(lambda: arena.dispatcher.process.returncode is not None, "the process to end")
        assert arena.dispatcher.process.returncode == 0


FAST = TimedSettings(step_s=0.002, tokens_per_step=20, max_model_len=100_000, block_count=10_000)


async def test_a_slow_client_receives_every_token() -> None:
    async with Arena(FAST) as arena:
        # With 20 logprobs per token the answer has several MB, more than a fixed flow-control window holds if nothing
        # is read.
        count = 12_000
        call = arena.dispatcher.narrow_stub().Generate(request(max_tokens=count, logprobs=20, omit_text=True))
        await until(lambda: arena.worker.submitted and arena.worker.request_count == 0, "the worker to be done")
        got: list[pb.GenerateResponse] = []
        while isinstance(response := await call.read(), pb.GenerateResponse):
            got.append(response)
        assert [t for r in got for t in r.token_ids] == scripted_tokens([1, 2, 3], 7, count)
        assert sum(len(r.logprobs) for r in got) == count
        assert max(len(r.token_ids) for r in got) > 20, (
            "tokens that arrived while the client did not read were not merged"
        )


async def to_the_end(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> None:
    while isinstance(await call.read(), pb.GenerateResponse):
        pass


async def test_a_client_that_does_not_read_is_cancelled_with_an_error() -> None:
    async with Arena(FAST, flags=["--dev", "client_stall_timeout_s=2"]) as arena:
        stub = arena.dispatcher.narrow_stub()
        stalled = stub.Generate(request(max_tokens=90_000, request_id="stalled", logprobs=20))
        await until(lambda: "stalled" in [name for name, _ in arena.worker.aborted], "the client to be given up")
        status = await arena.dispatcher.status()
        assert dict(status.requests_total) == {"cancelled": 1}
        with pytest.raises(grpc.RpcError) as caught:
            await to_the_end(stalled)
        error = from_rpc_error(caught.value, "dispatcher")
        assert isinstance(error, errors.Cancelled)
        assert "read nothing for 2 s" in str(error)


async def test_a_client_without_streaming_is_not_cancelled_while_its_answer_is_generated() -> None:
    slow = TimedSettings(step_s=0.05, max_model_len=1000)
    async with Arena(slow, flags=["--dev", "client_stall_timeout_s=0.5"]) as arena:
        stub = arena.dispatcher.narrow_stub()
        [response] = [r async for r in stub.Generate(request(max_tokens=60, collect=True))]
        assert len(response.token_ids) == 60


async def test_startup_errors_are_one_line_with_status_2(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    write_tokenizer(tmp_path / "good", 512, qwen=False, max_len=64)
    (tmp_path / "bad" / "tokenizer.json").write_text("{")

    with PrivateStateServer() as state, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            ("bad", state.url, "0"): "tokenizer.json: is not a valid tokenizer",
            ("none", state.url, "0"): "is no folder on this machine",
            ("good", "nonsense://x", "0"): "redis_url",
            ("good", state.url, port): f"cannot listen on 127.0.0.1:{port}",
        }
        dispatchers = [  # started all at once, since most of their startup is imports
            Dispatcher(tmp_path / model, tmp_path, url, f"d{number}", ["--port", port])
            for number, (model, url, port) in enumerate(cases)
        ]
        for dispatcher, expected in zip(dispatchers, cases.values(), strict=True):
            assert await dispatcher.process.wait(60)
            assert dispatcher.process.returncode == 2
            [line] = [line for line in dispatcher.process.log().splitlines() if "configuration error" in line]
            assert expected in line


async def test_an_unreachable_state_server_is_waited_for(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 512, qwen=False, max_len=64)

    with PrivateStateServer() as state:
        state.stop()
        dispatcher = Dispatcher(tmp_path, tmp_path, state.url, "d", [])
        await until(lambda: "waiting for the state server" in dispatcher.process.log(), "a word about waiting")
        state.restart()
        await dispatcher.start()
        state.stop()
        await dispatcher.process.stop(60)
        assert dispatcher.process.returncode == 0
        again = Dispatcher(tmp_path, tmp_path, state.url, "d", [])
        await until(lambda: "waiting for the state server" in again.process.log(), "a word about waiting")
        await again.process.stop(60)
        assert again.process.returncode == 0
        await dispatcher.channel.close()
