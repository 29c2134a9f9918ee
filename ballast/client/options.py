"""Options of a request besides its prompt and sampling parameters."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from ballast.client.codec import Messages
from ballast.client.stream import Metadata
from ballast.common.sampling import PriorityClass


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`, documented at `AsyncClient.generate`."""

    max_tokens: int | None
    token_ids: Sequence[int] | None
    messages: Messages | None
    deadline_s: float | None
    request_id: str | None
    priority: PriorityClass | str
    include_text: bool
    fit_max_tokens: bool
    cache_salt: str
    template_variables: Mapping[str, object] | None
    metadata: Metadata | None
