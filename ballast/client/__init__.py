"""The SDK: `Client` for synchronous code, `AsyncClient` for asyncio. It needs neither torch nor a GPU.

    from ballast.client import Client, SamplingParams

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", SamplingParams(max_tokens=32)).text)
        for chunk in client.stream(messages=[{"role": "user", "content": "Hello!"}]):
            print(chunk.text, end="", flush=True)

Errors: `InvalidRequest` (fix the request), `Overloaded` (wait `retry_after_s`), `Unavailable` (no dispatcher accepted
it), `DeadlineExceeded`, `Cancelled` and others.
"""

from ballast.client.aio import AsyncClient
from ballast.client.stream import GenerationStream
from ballast.client.sync import Client, SyncGenerationStream
from ballast.client.types import (
    ChatMessage,
    ClusterStatus,
    EndedRequest,
    EndedRequests,
    Generation,
    GenerationChunk,
    GroupStatus,
    Logprobs,
    RecentTimes,
    RequestMoment,
    RequestStory,
    TokenLogprob,
    Usage,
    WorkerStatus,
)
from ballast.common.errors import (
    AlreadyExists,
    BallastError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from ballast.common.model import ModelInfo
from ballast.common.sampling import FinishReason, Grammar, GrammarKind, PriorityClass, SamplingParams

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "BallastError",
    "Cancelled",
    "ChatMessage",
    "Client",
    "ClusterStatus",
    "DeadlineExceeded",
    "EndedRequest",
    "EndedRequests",
    "FinishReason",
    "Generation",
    "GenerationChunk",
    "GenerationStream",
    "Grammar",
    "GrammarKind",
    "GroupStatus",
    "InvalidRequest",
    "Logprobs",
    "ModelInfo",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "PriorityClass",
    "RecentTimes",
    "RequestMoment",
    "RequestStory",
    "SamplingParams",
    "SyncGenerationStream",
    "TokenLogprob",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "WorkerStatus",
]
