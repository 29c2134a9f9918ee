"""Converts errors to responses for clients: an HTTP status and a body in OpenAI's format."""

import math
import re

from ballast.common import errors
from ballast.service.failures import Failure, invalid

# Fields in errors of dispatchers -> their names in the client's request.
_PARAMS = {
    "sampling.max_tokens": "max_tokens",
    "sampling.grammar": "response_format",
    "conversation": "messages",
    "conversation.messages": "messages",
    "text": "prompt",
}


def failure_of(error: BaseException) -> Failure:
    """Return the response to a client whose request failed with this error."""
    match error:
        case Failure():
            return error
        case errors.InvalidRequest():
            return _invalid_request(error)
        case errors.Overloaded():
            return _busy("overloaded", error.why, error.retry_after_s)
        case errors.Unavailable():
            return _busy("unavailable", str(error), 1.0)
        case errors.DeadlineExceeded():
            return Failure(504, "timeout_error", "deadline_exceeded", str(error))
        case errors.Cancelled():
            return Failure(499, "invalid_request_error", "cancelled", str(error))
        case errors.Unauthenticated():
            why = "a valid token is needed, as Authorization: Bearer TOKEN (the API key of OpenAI's clients)"
            return Failure(401, "invalid_request_error", "invalid_api_key", why, headers={"www-authenticate": "Bearer"})
        case errors.PermissionDenied():
            return Failure(403, "invalid_request_error", "permission_denied", str(error))
        case errors.AlreadyExists():
            return Failure(409, "invalid_request_error", "already_exists", str(error))
        case errors.NotFound():
            return Failure(404, "invalid_request_error", "not_found", str(error))
        case errors.NotPossible() | errors.NotActive() | errors.StaleEpoch():
            return Failure(409, "invalid_request_error", "not_possible", str(error))
        case RecursionError():
            return invalid(None, "the body is nested too deeply", code="invalid_json")
        case errors.BallastError():
            return Failure(500, "server_error", "internal_error", str(error))
        case _:
            return Failure(500, "server_error", "internal_error", "the gateway failed; see its log")


def _invalid_request(error: errors.InvalidRequest) -> Failure:
    if "max_message_bytes" in error.why:
        why = "the request is larger than dispatchers accept (their --max-message-bytes)"
        return invalid(None, why, code="body_too_large", status=413)
    param = _PARAMS.get(error.field, error.field.removeprefix("sampling.").removeprefix("grammar."))
    param = re.sub("^token_ids", "prompt", param)  # `param` may have an index, as in token_ids[7]
    longest = re.search(r"max_model_len\D*(\d+)", error.why)
    if longest is None:
        return invalid(param, error.why)
    # LiteLLM, LangChain and others recognise this error by its words.
    why = f"This model's maximum context length is {longest[1]} tokens: {error.why}"
    return invalid(param, why, code="context_length_exceeded")


def _busy(code: str, why: str, retry_after_s: float) -> Failure:
    headers = {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(math.ceil(retry_after_s * 1e3)),
    }
    return Failure(503, "server_error", code, why, headers=headers)
