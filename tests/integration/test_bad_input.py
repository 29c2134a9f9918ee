"""Bad input gets a clear error that names the fault, and affects no other request."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ballast.client import AsyncClient
from ballast.common.errors import InvalidRequest
from ballast.common.sampling import SamplingParams
from ballast.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from ballast.rpc.errors import from_rpc_error
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.support.cluster import RunningCluster, idle, running_cluster, until
from tools.model.tiny import make_tiny

VOCAB, MAX_LEN = 512, 256


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    model = make_tiny("qwen2", tmp_path_factory.mktemp("model") / "tiny", vocab=VOCAB, max_len=MAX_LEN)
    with running_cluster(Path(model), workers=1, device_memory_bytes=4 << 20) as cluster:
        yield cluster


def tokens(*ids: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids))


def sampled(**sampling: float) -> inference_pb2.GenerateRequest:
    request = tokens(5, 6, 7)
    for name, value in sampling.items():
        setattr(request.sampling, name, value)
    return request


# Sent as raw gRPC messages, since the SDK rejects most of these before sending.
BAD = {
    "no prompt": (inference_pb2.GenerateRequest(), "prompt"),
    "empty token ids": (tokens(), "empty"),
    "empty text": (inference_pb2.GenerateRequest(text=""), "empty"),
    "token id too large": (tokens(1, VOCAB), str(VOCAB)),
    "negative token id": (tokens(-3), "-3"),
    "prompt too long": (tokens(*[9] * MAX_LEN), str(MAX_LEN)),
    "negative temperature": (sampled(temperature=-1.0), "temperature"),
    "temperature not a number": (sampled(temperature=math.nan), "temperature"),
    "top_p zero": (sampled(top_p=0.0), "top_p"),
    "top_p infinite": (sampled(top_p=math.inf), "top_p"),
    "max_tokens zero": (sampled(max_tokens=0), "max_tokens"),
    "min above max": (sampled(max_tokens=3, min_tokens=4), "min_tokens"),
    "too many logprobs": (sampled(logprobs=1000), "logprobs"),
    "unknown priority": (
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5]), priority=17),  # pyright: ignore[reportArgumentType]
        "priority",
    ),
    "request id too long": (
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5]), request_id="x" * 129),
        "request_id",
    ),
    "empty stop string": (
        inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[5]), sampling=cluster_pb2.SamplingParams(stop=[""])
        ),
        "stop",
    ),
}


async def refused(address: str, request: inference_pb2.GenerateRequest) -> InvalidRequest:
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60):
                pass
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    error = from_rpc_error(caught.value, address)
    assert isinstance(error, InvalidRequest)
    return error


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_with_a_reason(running: RunningCluster, name: str) -> None:
    request, hint = BAD[name]
    error = running.run(refused(running.cluster.address, request))
    assert hint in str(error)


def test_a_message_over_the_bound_is_refused(running: RunningCluster) -> None:
    request = inference_pb2.GenerateRequest(text="x" * (MAX_MESSAGE_BYTES + 1))

    async def story() -> None:
        # A client without our message size limit, so that it does send the message.
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(running.cluster.address, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60):
                    pass
        assert isinstance(from_rpc_error(caught.value, "dispatcher"), InvalidRequest)

    running.run(story())


def test_bad_requests_affect_no_other_request(running: RunningCluster) -> None:
    """A valid request that runs during many bad ones gets the same tokens as alone."""

    async def story() -> None:
        async with AsyncClient(running.cluster.address) as client:
            sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
            alone = await client.generate(token_ids=[5, 6, 7], sampling=sampling)
            good = asyncio.ensure_future(client.generate(token_ids=[5, 6, 7], sampling=sampling))
            await asyncio.gather(*(refused(running.cluster.address, request) for request, _ in BAD.values()))
            assert (await good).token_ids == alone.token_ids
            await until(client, idle)

    running.run(story())
