"""A request's state from its arrival to its ending."""

from dataclasses import dataclass, field

from ballast.common.marks import Mark, marks_of
from services.dispatcher.core.events import Facts, Request
from services.dispatcher.core.story import Moment, Recent, Story, What
from services.dispatcher.policy.freeness import WorkerKey


@dataclass(slots=True, kw_only=True)
class Tracked:
    """One accepted request. It is in the backlog, on a worker, or `moving` between two workers."""

    request: Request
    serial: int  # order of arrival; does not change with replays, so the request keeps its position in the backlog
    arrived_at_s: float
    queued_at_s: float  # time at which it last began to wait in a queue
    worker: WorkerKey | None = None
    handle: int = 0
    placed_at_s: float = 0.0  # time of its last placement
    recalled: bool = False  # True: its worker was asked to return it, because another one has room
    recall_count: int = 0
    moving: bool = False  # True: handed over, but the stream to its new worker is not open yet
    attempt: int = 0
    replay_count: int = 0
    idle_move_count: int = 0  # number of moves since its last token
    output_token_ids: list[int] = field(default_factory=list[int])
    text_chars: int = 0
    queue_s: float = 0.0  # total time in queues of this dispatcher
    first_token_at_s: float | None = None
    last_token_at_s: float = 0.0
    longest_gap_s: float = 0.0  # longest time between two tokens
    longest_gap_token: int = 0  # index of the token after the longest gap
    awaits_token: bool = True  # True: no token since the last placement
    move_count: int = 0
    cached_token_count: int = 0
    prompt_marks: tuple[Mark, ...] | None = None  # None: not computed yet
    story: Story = field(default_factory=Story)
    blocked_since_s: float | None = None  # time since which no worker could run it at once
    long: bool = False  # True: does not fit on a single instance; see `LongRequests`
    groupless_since_s: float | None = None  # time since which no group can hold this long request
    offline: bool = field(init=False)  # True for the batch class

    def __post_init__(self) -> None:
        self.offline = self.request.priority.offline

    @property
    def marks(self) -> tuple[Mark, ...]:
        if self.prompt_marks is None:
            self.prompt_marks = marks_of(self.request.prompt_token_ids, self.request.cache_salt)
        return self.prompt_marks

    @property
    def token_count(self) -> int:
        """Number of prompt tokens and output tokens so far, with which an attempt starts."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def made_count(self) -> int:
        """Number of output tokens that this dispatcher has received, as opposed to those of earlier attempts."""
        return len(self.output_token_ids) - len(self.request.output_token_ids)

    def facts(self, at_s: float) -> Facts:
        waited_s = at_s - self.queued_at_s if self.worker is None and not self.moving else 0.0
        first_s = self.first_token_at_s
        return Facts(
            prompt_token_count=len(self.request.prompt_token_ids),
            completion_token_count=len(self.output_token_ids),
            replay_count=self.replay_count,
            queue_s=self.queue_s + waited_s,
            ttft_s=None if first_s is None or self.request.output_token_ids else first_s - self.arrived_at_s,
            e2e_s=at_s - self.arrived_at_s,
            cached_token_count=self.cached_token_count,
            caller=self.request.caller,
            traceparent=self.request.traceparent,
            priority=self.request.priority,
            max_token_count=self.request.sampling.max_tokens,
            arrived_at_s=self.arrived_at_s,
            worker_id=next((m.worker_id for m in reversed(self.story.moments) if m.worker_id), ""),
            move_count=self.move_count,
            recall_count=self.recall_count,
            longest_gap_s=self.longest_gap_s,
            longest_gap_token=self.longest_gap_token,
            story=self.story,
        )

    def note(self, at_s: float, what: What, worker_id: str = "", detail: str = "") -> None:
        self.story.add(Moment(at_s, what, len(self.output_token_ids), worker_id, detail))

    def take_first_token(self, at_s: float, recent: Recent, layout: str) -> None:
        """Handle the first token after a placement. `layout`: description of the current layout."""
        self.awaits_token = False
        self.idle_move_count = 0
        worker_id = self.worker.worker_id if self.worker is not None else ""
        if self.first_token_at_s is None:
            self.first_token_at_s = self.last_token_at_s = at_s
            if not self.offline:
                recent.add(at_s, at_s - self.arrived_at_s)
            self.note(at_s, What.FIRST_TOKEN, worker_id)
        else:
            gap_s = at_s - self.last_token_at_s
            self.story.add(Moment(at_s, What.RESUMED, len(self.output_token_ids), worker_id, layout, gap_s))


def tracked_of(request: Request, serial: int, at_s: float) -> Tracked:
    """Create the state of a new request, possibly with a partial answer from another dispatcher."""
    tracked = Tracked(
        request=request,
        serial=serial,
        arrived_at_s=at_s,
        queued_at_s=at_s,
        output_token_ids=list(request.output_token_ids),
        text_chars=request.text_chars,
    )
    if request.output_token_ids:
        tracked.first_token_at_s = tracked.last_token_at_s = at_s
        tracked.note(at_s, What.TAKEN_OVER)
    return tracked
