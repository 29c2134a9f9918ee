"""All that the next leader of a sequence needs to know. Instants are told relative to now: clocks differ."""

from dataclasses import dataclass

from ballast.common.ids import RequestId
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from services.worker.core.batch import SequenceId, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSnapshot:
    sequence_id: SequenceId
    request_id: RequestId
    attempt: int
    priority: PriorityClass
    age_s: float  # since its submission: keeps its place among the others
    deadline_s: float | None  # time left
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams  # its seed is set
    wants_text: bool
    computed_tokens: int  # so many of the first tokens have their KV in the caches of the stages
    on_stages: bool  # stages hold blocks for it
    suspended: bool  # its KV was on its way when it was handed over
    gone: bool  # it has ended, and only the blocks that its KV is travelling into are left of it
    # The stop matcher: text held back, characters not to be passed on again, characters that have gone through.
    held_text: str
    skip_chars: int
    passed_chars: int
    # What its dispatcher was sent, over all attempts, and what nobody was there to be sent.
    emitted_token_count: int
    emitted_chars: int
    unsent_text: str
    unsent_logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None  # it has ended, and its dispatcher does not know yet
    matched_stop: str
    error: str
    invalid: bool
