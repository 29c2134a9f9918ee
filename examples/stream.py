"""Streams an answer with the SDK, over gRPC. Requires only `pip install ballast-serve`.

    ballast up                                   # in another terminal
    python examples/stream.py "Once upon a time"

BALLAST_ADDRESS: addresses of the dispatchers, comma-separated (default: 127.0.0.1:50051).
"""

import sys

from ballast.client import Client, SamplingParams


def main(prompt: str) -> None:
    with Client() as client:
        for chunk in client.stream(prompt, SamplingParams(seed=7), max_tokens=48):
            print(chunk.text, end="", flush=True)  # leaving this loop early cancels the request
            if chunk.usage is not None:
                usage = chunk.usage
                print(f"\n{chunk.finish_reason}: {usage.completion_tokens} tokens in {usage.e2e_s:.2f} s", end="")
                print(f", the first one after {1e3 * usage.ttft_s:.0f} ms")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Once upon a time")
