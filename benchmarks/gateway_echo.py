"""The least that a gateway of these parts can cost: uvicorn and grpc.aio, and nothing between them.

`python -m benchmarks.gateway --echo` measures it in the gateway's place. No checks, bounds, errors, metrics, names,
resumption and OpenAI's form: each response with text becomes an event.
"""

import argparse
import json
import socket

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from ballast.rpc.channel import open_channel
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb
from ballastpb.inference.v1 import inference_pb2_grpc


async def serve(dispatcher: str) -> None:
    async with open_channel(dispatcher, to_all=True) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def echo(scope: Scope, receive: Receive, send: Send) -> None:
            body = b""
            while (message := await receive())["type"] == "http.request":
                body += message["body"]
                if not message["more_body"]:
                    break
            asked = json.loads(body)
            sampling = cluster_pb2.SamplingParams(max_tokens=asked["max_tokens"], seed=1, ignore_eos=True)
            call = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=asked["prompt"]), sampling=sampling))
            head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            while isinstance(response := await call.read(), pb.GenerateResponse):
                if head is not None:
                    await send(head)
                    head = None
                if response.text:
                    event = f'data: {{"text":{json.dumps(response.text)}}}\n\n'.encode()
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setblocking(False)
        config = uvicorn.Config(
            echo, http="httptools", ws="none", loop="none", lifespan="off", log_config=None, access_log=False
        )
        print(f"ready service=echo id=echo address=127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await uvicorn.Server(config).serve(sockets=[listener])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dispatchers", required=True)
    args, _ = parser.parse_known_args()  # the gateway's others
    uvloop.run(serve(args.dispatchers))


if __name__ == "__main__":
    main()
