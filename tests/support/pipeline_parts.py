"""Parts of a simulated cluster of cores: requests as a dispatcher sees them, workers, and groups."""

from collections import deque
from dataclasses import dataclass, field

from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from services.worker.core import events as w
from services.worker.core.batch import Batch, NewSequence, StepResult
from services.worker.core.blocks import BlockBook, Table
from services.worker.core.limits import WorkerLimits
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.worker import WorkerCore
from services.worker.policy.harvest import Harvest
from services.worker.policy.microbatching import Microbatching
from tests.support.worker_core import Undisturbed, piece, undisturbed

LAYERS = 5


@dataclass
class Request:
    """A request, with the dispatcher's knowledge of it."""

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    wants_text: bool
    priority: PriorityClass
    deadline_at_s: float | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[int] = field(default_factory=list)
    past: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # (tokens, characters) after each message
    attempt: int = 0
    at: tuple["Worker", w.SequenceKey] | None = None
    claim_at: "Worker | None" = None  # the request has moved there, and the dispatcher has not followed yet
    ending: w.Ending | None = None
    abandoned: bool = False  # the dispatcher has forgotten the request
    want: Undisturbed | None = None

    @property
    def is_open(self) -> bool:
        return self.ending is None and not self.abandoned

    def roll_back(self, point: tuple[int, int]) -> None:
        """Truncates the answer to `point`, as if the dispatcher had lost everything after it."""
        token_count, char_count = point
        del self.tokens[token_count:]
        del self.logprobs[token_count:]
        self.text = self.text[:char_count]
        self.past = [p for p in self.past if p <= point]

    def judge(self, max_model_len: int) -> None:
        """Checks that the answer equals that of the undisturbed request, or a prefix of it."""
        if self.want is None:
            self.want = undisturbed(self.prompt, self.sampling, max_model_len)
        want = self.want
        tokens, text = tuple(self.tokens), self.text
        assert tokens == want.token_ids[: len(tokens)]
        if self.sampling.logprobs is not None:
            assert tuple(self.logprobs) == tokens
        wanted_text = want.text if self.wants_text else ""
        if self.ending is None:
            assert wanted_text.startswith(text)
        elif self.ending.finish_reason is FinishReason.ERROR and "out of luck" not in self.ending.error:
            assert "KV" in self.ending.error  # too long for the smallest group that it moved to
        elif self.ending.finish_reason in (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR):
            assert text == ("".join(piece(t) for t in tokens) if self.wants_text else "")
        else:
            assert (tokens, text) == (want.token_ids, wanted_text)
            assert (self.ending.finish_reason, self.ending.matched_stop) == (
                want.finish_reason,
                want.matched_stop,
            )


class Worker:
    def __init__(
        self, ordinal: int, limits: WorkerLimits, memory_units: int, microbatching: Microbatching, harvest: Harvest
    ) -> None:
        self.worker_id = WorkerId(f"w{ordinal}")
        self.clock_ahead_s = 1000.0 * ordinal
        self.memory_units = memory_units  # one block of one layer takes one unit
        self.book = BlockBook(self.blocks_with(LAYERS), limits.block_tokens)
        self.core = WorkerCore(
            limits,
            self.book.block_count,
            book=self.book,
            first_sequence_id=ordinal << 32,
            microbatching=microbatching,
            harvest=harvest,
        )
        self.layers = range(LAYERS)
        self.cache: dict[tuple[int, int, int], int] = {}  # (layer, block, offset) -> token id
        self.known: dict[int, NewSequence] = {}
        self.queue: deque[tuple[Batch, tuple[Table, ...] | None, dict[int, list[int]]]] = deque()
        self.host: dict[tuple[int, int], dict[int, int]] = {}  # (layer, host block) -> offset -> token id
        self.copies: dict[int, tuple[w.BlockCopy, ...]] = {}  # step id -> copies of queued batches
        self.copied_blocks = 0
        self.stream_id = 0
        self.letters: deque[w.Emit] = deque()  # sent but not yet read
        self.detokenizers: dict[int, list[int]] = {}

    def copy(self, copies: tuple[w.BlockCopy, ...], block_tokens: int) -> None:
        for copy in copies:
            self.copied_blocks += len(copy.device_blocks)
            for device, host in zip(copy.device_blocks, copy.host_blocks, strict=True):
                for layer in self.layers:
                    places = [(layer, device, place) for place in range(block_tokens)]
                    if copy.out:
                        self.host[layer, host] = {p[2]: self.cache[p] for p in places if p in self.cache}
                    else:
                        self.cache.update({(layer, device, p): t for p, t in self.host[layer, host].items()})

    def blocks_with(self, layer_count: int) -> int:
        return self.memory_units // layer_count


@dataclass(eq=False)
class Group:
    members: list[Worker]
    results: deque[StepResult | int] = field(default_factory=deque)  # or the step id of a preempted batch
    batches: dict[int, Batch] = field(default_factory=dict)  # step id -> batch in flight
    handovers: list[tuple[SequenceSnapshot, ...]] = field(default_factory=list)  # on the way to the leader

    @property
    def leader(self) -> Worker:
        return self.members[0]
