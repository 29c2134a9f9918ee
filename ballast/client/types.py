"""Types returned by the SDK: frozen dataclasses, no protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ballast.common.layout import Layout, Member
from ballast.common.load import LoadReport
from ballast.common.model import ModelInfo
from ballast.common.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: A role that the model's chat template knows, usually system, user or assistant.
        content: The text of the turn.
        extra: Further keys for the chat template, such as tool_calls, tool_call_id and name.
    """

    role: str
    content: str
    extra: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability.

    Attributes:
        token_id: The token.
        logprob: Its log-probability.
        token: The token's bytes, possibly only part of a character.
    """

    token_id: int
    logprob: float
    token: bytes = b""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs at one position.

    Attributes:
        chosen: The generated token.
        top: The `SamplingParams.logprobs` most probable tokens at this position, best first.
        prompt: Logprobs of all prompt tokens; only with the first generated token, and if requested by
            `SamplingParams.prompt_logprobs`. That of the first prompt token is 0, without alternatives.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    prompt: "tuple[Logprobs, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts and times of a request.

    Attributes:
        prompt_token_count: Tokens of the prompt, special tokens included.
        completion_token_count: Generated tokens.
        replay_count: How often the request was restarted after the loss of a worker; its tokens do not change.
        queue_s: Time in the dispatcher's backlog.
        ttft_s: Time to first token, measured by the dispatcher, or by the SDK if another dispatcher took over.
        e2e_s: Time from arrival to the end, measured in the same way.
        seed: The seed used: the request's own, or one drawn at its arrival.
        cached_token_count: Prompt tokens whose KV was already cached.
    """

    prompt_token_count: int
    completion_token_count: int
    replay_count: int
    queue_s: float
    ttft_s: float
    e2e_s: float
    seed: int
    cached_token_count: int = 0

    @property
    def prompt_tokens(self) -> int:
        """OpenAI's name for `prompt_token_count`."""
        return self.prompt_token_count

    @property
    def completion_tokens(self) -> int:
        """OpenAI's name for `completion_token_count`."""
        return self.completion_token_count

    @property
    def total_tokens(self) -> int:
        return self.prompt_token_count + self.completion_token_count


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """The part of an answer received since the previous chunk.

    Attributes:
        request_id: The id of the request.
        text: New text; may be empty, and may lag behind the tokens.
        token_ids: New tokens.
        logprobs: One per new token if requested, otherwise empty.
        prompt_token_count: Tokens of the prompt.
        finish_reason: Why the answer ended; None in all chunks but the last.
        matched_stop: The stop string or token that ended the answer; None otherwise.
        usage: Counts and times; None in all chunks but the last.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt_token_count: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A complete answer.

    Attributes:
        request_id: The id of the request.
        text: The whole text.
        token_ids: All generated tokens.
        logprobs: One per token if requested, otherwise empty.
        finish_reason: STOP or LENGTH; other endings are raised as errors.
        matched_stop: The stop string or token that ended the answer; None otherwise.
        usage: Counts, times and the seed.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason
    matched_stop: str | None
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker as a dispatcher sees it.

    Attributes:
        worker_id: The worker's name, stable over restarts.
        incarnation: Number of the process lifetime; it grows with each start.
        address: host:port of its gRPC server.
        group_id: The group in which it serves.
        connected: Whether the dispatcher is connected to the worker's group.
        load: The last load report; None before the first. Only leaders report to dispatchers, for their whole group;
            the report's memory figures are the leader's own.
    """

    worker_id: str
    incarnation: int
    address: str
    group_id: str
    connected: bool
    load: LoadReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """Workers that together hold one complete copy of the model and serve as a pipeline. Most groups have a single
    member.

    Attributes:
        group_id: The group's name, which changes with its members.
        members: Members in the order of their stages, each with its layers; the first is the leader.
        workers: The same workers as the dispatcher sees them; None for unknown ones.
    """

    group_id: str
    members: tuple[Member, ...]
    workers: tuple[WorkerStatus | None, ...]

    @property
    def leader_id(self) -> str:
        return self.members[0].worker_id

    @property
    def leader(self) -> WorkerStatus | None:
        return self.workers[0]

    @property
    def load(self) -> LoadReport | None:
        """Load of the whole group; its blocks are those available on every stage."""
        return self.leader.load if self.leader is not None else None

    @property
    def capacity_tokens(self) -> int:
        """KV capacity in tokens; 0 before the first report."""
        return self.load.block_count * self.load.block_tokens if self.load is not None else 0

    @property
    def used_tokens(self) -> int:
        """KV capacity in use (`LoadReport.used_block_count`), in tokens; 0 before the first report."""
        return self.load.used_block_count * self.load.block_tokens if self.load is not None else 0

    @property
    def demand_tokens(self) -> int:
        """KV capacity in use plus that needed by waiting requests, in tokens."""
        waiting = self.load.waiting_block_count * self.load.block_tokens if self.load is not None else 0
        return self.used_tokens + waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentTimes:
    """Recent latencies of one dispatcher's requests. Quantiles are 0 if nothing was measured.

    Attributes:
        window_s: Length of the time window.
        first_token_count: Requests that received their first token within the window.
        ttft_p50_s: Median time to first token.
        ttft_p99_s: P99 of the time to first token.
        tpot_p50_s: Median time per token after the first, of running requests and of those that ended in the window.
        tpot_p99_s: P99 of the time per token after the first, of the same requests.
        longest_wait_s: Longest current wait of a request for its first token.
        generated_tokens_total: Tokens delivered to clients since the dispatcher started.
        replays_total: Requests restarted after the loss of their worker since the dispatcher started.
    """

    window_s: float = 0.0
    first_token_count: int = 0
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    tpot_p50_s: float = 0.0
    tpot_p99_s: float = 0.0
    longest_wait_s: float = 0.0
    generated_tokens_total: int = 0
    replays_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMoment:
    """An event in the life of a request.

    Attributes:
        at_s: Seconds since the request's arrival.
        what: waiting, placed, moved, moving, stranded, first_token, resumed, lost, sent_back, recalled or taken_over.
        worker_id: The worker concerned; may be empty.
        detail: Explanation; may be empty.
        token_count: Tokens of the answer at this time.
        gap_s: For `resumed`: seconds since the previous token.
    """

    at_s: float
    what: str
    worker_id: str = ""
    detail: str = ""
    token_count: int = 0
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """Arrival time and lengths of a request that has ended.

    Attributes:
        arrived_unix_s: Arrival time by the dispatcher's clock.
        prompt_token_count: Tokens of the prompt.
        completion_token_count: Generated tokens.
        priority: Priority class.
    """

    arrived_unix_s: float
    prompt_token_count: int
    completion_token_count: int
    priority: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequests:
    """Requests that have ended at one dispatcher since the call whose `last` was given.

    Attributes:
        requests: In the order in which they ended, without those that received no token.
        last: Number of the newest ended request, to be passed as `after` to the next call.
        forgotten_count: Further requests that ended meanwhile and are no longer remembered.
        oldest_open_unix_s: Arrival of the oldest request in progress; None: there is none.
    """

    requests: tuple[EndedRequest, ...]
    last: int
    forgotten_count: int
    oldest_open_unix_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStory:
    """The history of a request, as remembered by its dispatcher.

    Attributes:
        request_id: The request's id.
        dispatcher_id: The dispatcher that answered.
        state: queued, running, moving, or how it ended: stop, length, cancelled, deadline, error, refused, invalid.
        error: The error; empty if there was none.
        age_s: Seconds since the request's arrival, or since its end if it has ended.
        priority: Priority class.
        caller: Name of the token with which the request was sent, or the address of the connection.
        prompt_token_count: Tokens of the prompt.
        completion_token_count: Tokens generated so far.
        max_token_count: Maximum number of tokens to generate (`max_tokens`).
        queue_s: Time in the backlog.
        ttft_s: Time to first token; None while there is no token.
        tpot_s: Mean time per token after the first; None while there is no such token.
        e2e_s: Time from the request's arrival to its end, or until now.
        replay_count: How often the request was restarted after the loss of its worker.
        move_count: How often the request migrated to another worker.
        recall_count: How often the request was moved from the queue of a full worker to a worker with room.
        longest_gap_s: Longest time between two of its tokens.
        longest_gap_token_count: Tokens received before that gap.
        moments: The request's events, oldest first.
        left_out_moment_count: Number of events that are not in `moments`, as there were too many.
    """

    request_id: str
    dispatcher_id: str
    state: str
    error: str
    age_s: float
    priority: str
    caller: str
    prompt_token_count: int
    completion_token_count: int
    max_token_count: int
    queue_s: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    replay_count: int
    move_count: int
    recall_count: int
    longest_gap_s: float
    longest_gap_token_count: int
    moments: tuple[RequestMoment, ...]
    left_out_moment_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The cluster as one dispatcher sees it.

    Attributes:
        dispatcher_id: The dispatcher that answered.
        address: The address that was asked.
        version: Version of Ballast that the dispatcher runs.
        layout: Groups and layer ranges; None before the first layout.
        model: The served model; None before the first worker.
        workers: All workers of the layout.
        backlog_request_count: Requests waiting in this dispatcher.
        backlog_token_count: Prompt tokens of these requests.
        offline_queued_count: Offline requests in this dispatcher that wait to be pulled by a worker.
        running_request_count: Requests of this dispatcher on workers.
        max_queued_request_count: Limit on requests in the backlog.
        max_queued_token_count: Limit on prompt tokens in the backlog.
        requests_total: Number of ended requests since the dispatcher started, by ending (`stop`, `error` ...).
        draining: Whether the dispatcher refuses new requests.
        uptime_s: Seconds since the dispatcher started.
        state_server_reachable: Whether the last call to the state server was answered.
        planner_address: host:port of the active planner; empty while unknown.
        recent: Recent latencies of the dispatcher's requests.
        kept_out: Workers that are currently kept out of all groups, and why.
        waiting_by_caller: Requests waiting in this dispatcher, by caller, for the callers with the most; for operators.
    """

    dispatcher_id: str
    address: str
    version: str
    layout: Layout | None
    model: ModelInfo | None
    workers: tuple[WorkerStatus, ...]
    backlog_request_count: int
    backlog_token_count: int
    running_request_count: int
    max_queued_request_count: int
    max_queued_token_count: int
    requests_total: Mapping[str, int]
    draining: bool
    uptime_s: float
    state_server_reachable: bool
    planner_address: str = ""
    recent: RecentTimes = RecentTimes()
    offline_queued_count: int = 0
    kept_out: Mapping[str, str] = field(default_factory=dict[str, str])
    waiting_by_caller: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def groups(self) -> tuple[GroupStatus, ...]:
        """Groups of the layout with the status of their workers; empty before the first layout."""
        known = {(worker.worker_id, worker.incarnation): worker for worker in self.workers}
        return tuple(
            GroupStatus(
                group_id=group.group_id,
                members=group.members,
                workers=tuple(known.get((m.worker_id, m.incarnation)) for m in group.members),
            )
            for group in (self.layout.groups if self.layout is not None else ())
        )
