"""A tool call, and an answer that conforms to a JSON schema, even from a model with random weights.

    ballast up                            # in another terminal; with a model whose template supports tools
    python examples/tools_and_schema.py

OPENAI_BASE_URL: URL of the gateway (default: http://127.0.0.1:8000/v1). OPENAI_API_KEY: token, if one is required.
"""

import json
import os

from openai import OpenAI
from pydantic import BaseModel, Field


class Ship(BaseModel):
    name: str = Field(max_length=12)
    masts: int = Field(ge=1, le=9)


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather will be.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    with OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "unused")) as ai:
        model = ai.models.list().data[0].id
        parsed = ai.chat.completions.parse(
            model=model,
            messages=[{"role": "user", "content": "Describe a ship."}],
            response_format=Ship,
            seed=7,
        )
        ship = parsed.choices[0].message.parsed
        print(f"schema: {ship!r}")
        answer = ai.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What will the weather be?"}],
            tools=[TOOL],  # type: ignore[list-item]
            tool_choice="required",
            seed=7,
        )
        for call in answer.choices[0].message.tool_calls or ():
            print(f"tool: {call.function.name}({json.loads(call.function.arguments)})")  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
