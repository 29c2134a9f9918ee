"""Clients that nobody wants, as a process of their own, so that they can vanish: `python -m benchmarks.crowd KIND ...`.

    silent   connect and say nothing
    preface  connect, begin as gRPC does, and ask for nothing
    drip     connect and say one byte every second
    stalled  begin long streams and read nothing of them
    readers  begin long streams and read them
    huge     prompts of 16 MiB, all at once
    large    prompts of 4 MiB, just under what one message may have
    empty    one message of eight million empty chat turns

Prints `there N` once its N connections or calls have begun, what was answered as `answer TEXT`, and stays until killed.
"""

import asyncio
import contextlib
import socket
import sys
import time
from collections import Counter
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2, inference_pb2_grpc

SILENT, PREFACE, DRIP = "silent", "preface", "drip"
STALLED, READERS, HUGE, LARGE, EMPTY = "stalled", "readers", "huge", "large", "empty"
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_HTTP1 = b"GET /metrics HTTP/1.1\r\nhost: x\r\nx-long: "
_TOKENIZE = "/ballastpb.inference.v1.InferenceService/Tokenize"
_NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.use_local_subchannel_pool", 1))
_STREAMS_OF_A_CONNECTION = 5
_Call: TypeAlias = "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"
_PROMPT_BYTES = {HUGE: (16 << 20) - 64, LARGE: (4 << 20) - 64}


def _connect(addresses: list[str], count: int) -> list[socket.socket]:
    """What is refused is left out."""
    found: list[socket.socket] = []
    for number in range(count):
        host, _, port = addresses[number % len(addresses)].rpartition(":")
        with contextlib.suppress(OSError):
            found.append(socket.create_connection((host, int(port)), 5))
    return found


def _sit(kind: str, addresses: list[str], count: int) -> None:
    there = _connect(addresses, count)
    for each in there if kind == PREFACE else ():
        with contextlib.suppress(OSError):
            each.sendall(_HTTP2)
    _say(f"there {len(there)}")
    for at in range(1 << 30):
        for number, each in enumerate(there) if kind == DRIP else ():
            words = _HTTP2 if number % 2 else _HTTP1 + b"x" * 10_000
            with contextlib.suppress(OSError):
                each.send(words[at % len(words) : at % len(words) + 1], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        time.sleep(1.0)


async def _stream(address: str, count: int, *, read: bool) -> None:
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]), omit_text=True)
    request.sampling.MergeFrom(cluster_pb2.SamplingParams(max_tokens=3000, ignore_eos=True, logprobs=20))
    calls: list[_Call] = []
    for _ in range(-(-count // _STREAMS_OF_A_CONNECTION)):
        channel = grpc.aio.insecure_channel(address, options=_NARROW)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        begun = [stub.Generate(request) for _ in range(min(_STREAMS_OF_A_CONNECTION, count - len(calls)))]
        calls += begun
        # Their requests are there then; an answer begins when a worker has room, which may be long after.
        await asyncio.wait([asyncio.ensure_future(call.wait_for_connection()) for call in begun], timeout=0.2)
    _say(f"there {len(calls)}")
    if read:
        await asyncio.gather(*(_read(call) for call in calls), return_exceptions=True)
    await asyncio.Event().wait()


async def _read(call: _Call) -> None:
    async for _ in call:
        pass


def _flood(address: str, data: bytes, count: int) -> None:
    """Threads of gRPC's own do the sending. The answers come as they come."""
    options = (("grpc.max_send_message_length", -1),)
    with grpc.insecure_channel(address, options=options) as channel:
        tokenize = cast(Any, channel.unary_unary)(_TOKENIZE)
        calls = [tokenize.future(data, timeout=120) for _ in range(count)]
        _say(f"there {count}")
        answers = Counter(_answer(call) for call in calls)
    for answer, times in answers.most_common():
        _say(f"answer {times} x {answer}")
    time.sleep(1 << 20)


# Any: a call of gRPC.
def _answer(call: Any) -> str:
    try:
        call.result()
    except grpc.RpcError as error:
        known = cast(grpc.Call, error)
        return f"{known.code().name}: {(known.details() or '')[:120]}"
    return "OK"


def _say(text: str) -> None:
    print(text, flush=True)


def main(kind: str, addresses: list[str], count: int) -> None:
    match kind:
        case "stalled" | "readers":
            asyncio.run(_stream(addresses[0], count, read=kind == READERS))
        case "huge" | "large":
            message = inference_pb2.TokenizeRequest(text="a ship " * (_PROMPT_BYTES[kind] // 7))
            _flood(addresses[0], message.SerializeToString(), count)
        case "empty":
            conversation = b"\x0a\x00" * count  # field 1: messages
            _flood(addresses[0], _field(2, conversation), 1)
        case _:
            _sit(kind, addresses, count)


def _field(number: int, data: bytes) -> bytes:
    """A message in that field of another one."""
    length, left = b"", len(data)
    while left > 0x7F:
        length, left = length + bytes([left & 0x7F | 0x80]), left >> 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + data


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3:], int(sys.argv[2]))
