"""A conversation through OpenAI's Python client with another base URL. Requires `pip install openai`.

    ballast up                        # in another terminal
    python examples/openai_client.py

OPENAI_BASE_URL: URL of the gateway (default: http://127.0.0.1:8000/v1). OPENAI_API_KEY: token, if one is required.
"""

import os

from openai import OpenAI


def main() -> None:
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    with OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "unused")) as ai:
        model = ai.models.list().data[0].id
        stream = ai.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Why does a ship carry ballast?"}],
            max_tokens=32,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage is not None:
                print(f"\n{model}: {chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
