"""Requests to a gateway generated from the schemas of its bodies, and corruption of the state server, for
`benchmarks.fuzz`.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import redis.asyncio
import redis.exceptions

from services.gateway.anthropic import MessagesRequest
from services.gateway.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from services.gateway.openai.responses import ResponsesRequest

# Any: JSON, and JSON schemas.
Json = Any
_BODIES: dict[str, Mapping[str, Json]] = {
    "/v1/chat/completions": ChatRequest.model_json_schema(),
    "/v1/completions": CompletionRequest.model_json_schema(),
    "/v1/responses": ResponsesRequest.model_json_schema(),
    "/v1/messages": MessagesRequest.model_json_schema(),
    "/v1/messages/count_tokens": MessagesRequest.model_json_schema(),
    "/tokenize": TokenizeRequest.model_json_schema(),
    "/detokenize": DetokenizeRequest.model_json_schema(),
}
_OTHERS = (
    "/v1/models",
    "/v1/models/x",
    "/v1/files",
    "/v1/batches",
    "/v1/embeddings",
    "/health",
    "/load",
    "/metrics",
    "/%",
)
_WORDS = (
    "",
    "x",
    "user",
    "assistant",
    "system",
    "tool",
    "text",
    "json_object",
    "json_schema",
    "function",
    "auto",
    "\x00",
)
_LONG = ("ü" * 300, "{" * 200, "\ud800", "../../etc/passwd", "<|im_end|>", "%s%n", "1e999")
_NUMBERS = (0, 1, -1, 2, 7, 100, 2**31, 2**63, -(2**63), 2**70, 0.0, -0.5, 0.3, 1e-300, 1e300)
_HEADERS = ("authorization", "traceparent", "tracestate", "content-type", "x-request-id", "accept", "origin", "cookie")
_MAX_DEPTH = 6
_MOST_TOKENS = 8  # maximum of most numbers, so that valid requests are short


class JsonMaker:
    """Generates values of a JSON schema; about one in 25 ignores the schema."""

    def __init__(self, rng: random.Random, root: Mapping[str, Json]) -> None:
        self._rng, self._defs = rng, root.get("$defs", {})

    def value(self, schema: Mapping[str, Json], depth: int = 0) -> Json:
        rng = self._rng
        if depth > _MAX_DEPTH or rng.random() < 0.04:
            return rng.choice((None, True, [], {}, [[]], {"a": {}}, rng.choice(_WORDS + _LONG), rng.choice(_NUMBERS)))
        if "$ref" in schema:
            return self.value(self._defs[schema["$ref"].rpartition("/")[2]], depth)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self.value(rng.choice(schema[several]), depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(rng.randint(0, 3))]
            case "string":
                return rng.choice(_WORDS) if rng.random() < 0.9 else rng.choice(_LONG)
            case "integer" | "number":
                return rng.randint(0, _MOST_TOKENS) if rng.random() < 0.8 else rng.choice(_NUMBERS)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case _:
                return rng.choice((None, 1, "x", [], {}))

    def _object(self, schema: Mapping[str, Json], depth: int) -> Json:
        rng, needed = self._rng, schema.get("required", ())
        share = 1.0 / (1 + depth) if depth else 0.15
        found = {
            name: self.value(inner, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if name in needed or rng.random() < share
        }
        if rng.random() < 0.1:
            found[rng.choice(_WORDS)] = rng.choice(_NUMBERS)
        return found


class HttpFuzz:
    """Generates requests for a gateway: headers, and bodies from the schemas, some of them mutated."""

    def __init__(self, rng: random.Random, address: str, model: str) -> None:
        self._rng, self._model = rng, model
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._makers = {path: JsonMaker(rng, schema) for path, schema in _BODIES.items()}

    def request(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.1:
            path, body = rng.choice(_OTHERS), b""
        else:
            path = rng.choice(list(_BODIES))
            body = self._body(path)
        method = "POST" if body or rng.random() < 0.3 else "GET"
        head = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}"]
        if body:
            head.append("content-type: application/json")
        lines = "\r\n".join(head).encode()
        if rng.random() < 0.1:
            lines += f"\r\n{rng.choice(_HEADERS)}: ".encode() + rng.randbytes(20).translate(None, b"\r\n")
        return lines + b"\r\n\r\n" + body

    def _body(self, path: str) -> bytes:
        rng = self._rng
        made = self._makers[path].value(_BODIES[path])
        if isinstance(made, dict):
            made = cast(dict[str, Json], made)
            if rng.random() < 0.9:
                made["model"] = self._model
            if rng.random() < 0.9:
                made["max_tokens"] = rng.randint(1, _MOST_TOKENS)
        body = json.dumps(made).encode()
        if rng.random() < 0.05:
            at = rng.randrange(len(body) + 1)
            body = body[:at] + rng.randbytes(3) + body[at + rng.randint(0, 3) :]
        return body

    async def send(self, within_s: float) -> str:
        """Send a newly generated request. Returns a text with its HTTP status, or with the error if there is none."""
        data = self.request()
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                with contextlib.closing(writer):
                    writer.write(data)
                    answer = await reader.readline()
                    rest = await reader.read(4096)
        except (OSError, TimeoutError, ValueError) as error:
            return f"http: {type(error).__name__}"
        status = answer.split(b" ")[1].decode() if answer.count(b" ") >= 2 else "none"
        if status == "500":
            return f"http: 500 of {data[:2000]!r}: {rest[-400:]!r}"
        return f"http: {status}"


async def spoil_state(rng: random.Random, url: str) -> str:
    """Delete a random key of the state server, or set it to a wrong value. Returns what happened."""
    client = redis.asyncio.Redis.from_url(url)
    try:
        keys = cast(Sequence[bytes], await client.keys())
        if not keys:
            return "state: empty"
        key = rng.choice(sorted(keys))
        await client.delete(key)
        match rng.randrange(5):
            case 0:
                await client.set(key, rng.randbytes(rng.randint(0, 60)))
            case 1:
                await client.set(key, json.dumps(rng.choice((None, [], {}, {"epoch": 1e308}, "x", -1))))
            case 2:
                await client.hset(key, mapping={"epoch": "x", "token": str(2**70), "": ""})
            case 3:
                await client.rpush(key, "a", b"\xff")
            case _:
                pass
    except redis.exceptions.RedisError as error:
        return f"state: {type(error).__name__}"
    finally:
        await client.aclose()
    return "state: spoilt"
