"""Programs are started while gRPC calls run, as the dispatcher does to compile grammars."""

import subprocess
import sys

STORY = """
import asyncio
import ballast.rpc
import grpc, grpc.aio, uvloop

class Echo(grpc.GenericRpcHandler):
    def service(self, _):
        async def echo(request, context):
            return request
        return grpc.unary_unary_rpc_method_handler(echo)

async def main():
    server = grpc.aio.server(handlers=[Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async def call():
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) as channel:
            while True:
                await channel.unary_unary("/echo/Echo")(b"x")
    calls = [asyncio.create_task(call()) for _ in range(16)]
    for _ in range(150):
        process = await asyncio.create_subprocess_exec("true")
        assert await process.wait() == 0
    assert not any(task.done() for task in calls)
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await server.stop(None)

uvloop.run(main())
"""


def test_a_process_with_grpc_calls_starts_programs_without_disturbing_them() -> None:
    ended = subprocess.run([sys.executable, "-c", STORY], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
