"""Resumption of requests after the death of their dispatcher.

The client has all the data: the request with a seed, and the tokens so far. Continuing from these generates the same
tokens (I2), so prompt and answer are not stored anywhere else. For each claimed request id, the state server stores the
dispatcher, the latest attempt and the hash of a secret. Therefore only the request's client can resume it, and if two
dispatchers serve it, the earlier attempt ends.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ballast.common.errors import InvalidRequest, NotPossible
from ballastpb.inference.v1 import inference_pb2 as pb

_SECRET_BYTES = range(16, 65)
_MAX_ATTEMPTS = 1 << 20
_HASH_CHARS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A client's data on earlier attempts. `prompt_digest`: 0 if unknown."""

    secret_hash: str
    attempt: int
    token_ids: Sequence[int]
    text_char_count: int
    prompt_digest: int

    def check(self, prompt_token_ids: Sequence[int], max_tokens: int, *, is_reproducible: bool) -> None:
        """Validate the data.

        Raises:
            InvalidRequest: the tokens cannot be continued, or the request is not reproducible.
            NotPossible: the prompt has changed.
        """
        count = len(self.token_ids)
        if count > max_tokens:
            raise InvalidRequest("resumption.token_ids", f"are {count}, more than max_tokens ({max_tokens})")
        if count and not is_reproducible:
            raise InvalidRequest("sampling.seed", "is needed to continue an answer with the same tokens")
        if self.prompt_digest and self.prompt_digest != digest_of(prompt_token_ids):
            why = "the prompt has other tokens than on the dispatcher that began the answer"
            raise NotPossible(f"{why} (does the chat template depend on the date?); send the request again")


def resumption_from_proto(message: pb.GenerateRequest, *, allowed: bool) -> Resumption | None:
    """Convert a message's resumption; None if the request cannot be resumed after the death of this dispatcher.

    Raises:
        InvalidRequest: the message is inconsistent.
        NotPossible: an answer has begun elsewhere, and resumption is disabled here.
    """
    if not message.HasField("resumption"):
        return None
    told = message.resumption
    if not message.request_id:
        raise InvalidRequest("request_id", "is needed with a resumption")
    if len(told.secret) not in _SECRET_BYTES:
        why = f"has {len(told.secret)} bytes, {_SECRET_BYTES.start} to {_SECRET_BYTES.stop - 1} are allowed"
        raise InvalidRequest("resumption.secret", why)
    if not 1 <= told.attempt <= _MAX_ATTEMPTS:
        raise InvalidRequest("resumption.attempt", f"must be 1 to {_MAX_ATTEMPTS}, got {told.attempt}")
    if told.attempt == 1 and told.token_ids:
        raise InvalidRequest("resumption.token_ids", "must be empty in the first attempt")
    if told.text_char_count < 0 or (told.text_char_count and not told.token_ids):
        raise InvalidRequest("resumption.text_char_count", f"{told.text_char_count} without tokens or below 0")
    if not allowed:
        if told.token_ids:
            raise NotPossible("resuming is disabled on this dispatcher (--resume false); send the request again")
        return None
    return Resumption(
        secret_hash=hashlib.sha256(told.secret).hexdigest()[:_HASH_CHARS],
        attempt=told.attempt,
        token_ids=list(told.token_ids),
        text_char_count=told.text_char_count,
        prompt_digest=told.prompt_digest,
    )


def digest_of(prompt_token_ids: Sequence[int]) -> int:
    """Return the digest of a prompt; never 0."""
    content = array("i", prompt_token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1
