"""What a leader tells the next one of a sequence that moves; the request itself comes from its dispatcher."""

from dataclasses import dataclass

from ballast.common.ids import RequestId
from ballast.common.sampling import PriorityClass
from services.worker.core.batch import SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSnapshot:
    sequence_id: SequenceId  # the key of its blocks on the stages
    request_id: RequestId
    computed_tokens: int  # its first tokens, whose KV is on the stages; 0: no KV moves with it
    checksum: int  # CRC-32 of their token ids: the KV is used for no other tokens
    token_count: int  # prompt and output
    priority: PriorityClass
    age_s: float  # seconds since its submission: clocks differ
