"""State of a moved sequence, sent by its leader to the next one. The request itself is sent by its dispatcher."""

from dataclasses import dataclass

from ballast.common.ids import RequestId
from ballast.common.sampling import PriorityClass
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSnapshot:
    sequence_id: SequenceId  # key of its blocks on the stages
    request_id: RequestId
    computed_tokens: int  # number of leading tokens with KV on the stages; 0: no KV is sent
    checksum: int  # CRC-32 of these token ids, compared before the KV is used
    token_count: int  # prompt and output
    priority: PriorityClass
    age_s: float  # seconds since its submission; relative, because clocks differ
    shared_blocks: Table = ()  # see `plan.Victim`
