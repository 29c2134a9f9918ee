"""The served model and its names."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast.client import AsyncClient
from ballast.client.stream import Metadata
from ballast.common.errors import BallastError
from ballast.common.model import ModelInfo
from services.gateway.errors import invalid

_ADMITTED_S = 30.0  # time for which a caller's check is valid; dispatchers check each request anyway
_MOST_ADMITTED = 4096


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The model as described by dispatchers."""

    name: str  # the model's name in answers
    info: ModelInfo
    chat_template: str
    default_sampling: Mapping[str, float]  # used for parameters that a request omits
    names: tuple[str, ...]  # names by which clients may call the base model

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters, which clients use as model names. A name of the base model takes precedence."""
        return tuple(adapter.name for adapter in self.info.adapters if adapter.name not in self.names)

    def adapter_of(self, asked: str | None) -> str:
        """Return the adapter that a request's model name selects; "" for the base model, or if the request names no
        model.

        Raises:
            Failure: no such model is served.
        """
        if not asked or asked in self.names:
            return ""
        if asked in self.adapters:
            return asked
        why = f"the model {asked!r} is not served here; served: {', '.join((*self.names, *self.adapters))}"
        raise invalid("model", why, code="model_not_found", status=404)


class ServedModel:
    """Caches facts about the model, which every request needs and which rarely change.

    Args:
        client: Client for the calls to dispatchers.
        names: Names by which clients may call the model; empty: the model's own name.
        refresh_s: Maximum age of the facts.
    """

    def __init__(self, client: AsyncClient, names: Sequence[str], refresh_s: float) -> None:
        self._client = client
        self._names = tuple(names)
        self._refresh_s = refresh_s
        self._known: KnownModel | None = None
        self._fresh_until_s = 0.0
        self._asking = asyncio.Lock()
        self._single_tokens: dict[str, int | None] = {}
        self._admitted_until_s: OrderedDict[bytes, float] = OrderedDict()  # by the hash of the caller's credentials

    @property
    def name(self) -> str:
        """The model's name in answers; empty while unknown."""
        return self._known.name if self._known is not None else ""

    async def get(self, metadata: Metadata | None) -> KnownModel:
        """Return the model, from the cache or from dispatchers.

        Raises:
            BallastError: dispatchers do not answer, and the cache is empty.
        """
        if self._known is not None and time.monotonic() < self._fresh_until_s:
            return self._known
        async with self._asking:
            if self._known is None or time.monotonic() >= self._fresh_until_s:
                try:
                    await self.ask(metadata)
                except BallastError:
                    if self._known is None:
                        raise
            assert self._known is not None, "cached now or earlier"
            return self._known

    async def admit(self, metadata: Metadata | None) -> None:
        """Check the caller's credentials, or reuse a recent check.

        Raises:
            BallastError: dispatchers refuse the caller, or cannot be reached.
        """
        given = (metadata or {}).get("authorization", "")
        digest = hashlib.sha256(given.encode()).digest()
        if time.monotonic() < self._admitted_until_s.get(digest, 0.0):
            return
        self._admitted_until_s.pop(digest, None)
        await self._client.model_info(metadata=metadata)
        self._admitted_until_s[digest] = time.monotonic() + _ADMITTED_S
        if len(self._admitted_until_s) > _MOST_ADMITTED:
            self._admitted_until_s.popitem(last=False)

    async def ask(self, metadata: Metadata | None) -> KnownModel:
        """Request the model from dispatchers and cache the answer."""
        info = await self._client.model_info(metadata=metadata)
        template = await self._client.chat_template(metadata=metadata)
        defaults = await self._client.default_sampling(metadata=metadata)
        names = self._names or (info.name,)
        self._known = KnownModel(names[0], info, template, defaults, names)
        self._fresh_until_s = time.monotonic() + self._refresh_s
        return self._known

    async def single_token(self, text: str, metadata: Metadata | None) -> int | None:
        """Return the token that encodes a whole text; None if the text takes several tokens, or dispatchers do not
        answer.
        """
        if text not in self._single_tokens:
            try:
                ids = await self._client.tokenize(text, add_special_tokens=False, metadata=metadata)
            except BallastError:
                return None
            self._single_tokens[text] = ids[0] if len(ids) == 1 else None
        return self._single_tokens[text]
