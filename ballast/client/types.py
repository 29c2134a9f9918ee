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
        role: What the model's chat template knows: system, user or assistant, as a rule.
        content: The text of the turn.
        extra: What else the model's chat template may look at: tool_calls, tool_call_id, name.
    """

    role: str
    content: str
    extra: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the logarithm of its probability.

    Attributes:
        token: The bytes that it stands for, which may be a part of a character only.
    """

    token_id: int
    logprob: float
    token: bytes = b""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs at one position.

    Attributes:
        chosen: The token that was generated.
        top: The most probable tokens there, best first; as many as `SamplingParams.logprobs` says.
        prompt: Of the first generated token, if `SamplingParams.prompt_logprobs` asks for it: those of all tokens of
            the prompt. The first of them has nothing before it: 0, and no others.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    prompt: "tuple[Logprobs, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost.

    Attributes:
        prompt_token_count: Tokens of the prompt, special tokens included.
        completion_token_count: Tokens that were generated.
        replay_count: How often it was started anew after a worker was lost; its tokens are the same all the same.
        queue_s: Time in the dispatcher's backlog.
        ttft_s: Time to the first token, as the dispatcher saw it.
        e2e_s: Time from arrival to the end, as the dispatcher saw it.
        seed: The seed that was used: given, or drawn when the request arrived.
        cached_token_count: Tokens of the prompt whose KV had been computed for another request.
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
        """OpenAI's name of `prompt_token_count`."""
        return self.prompt_token_count

    @property
    def completion_tokens(self) -> int:
        """OpenAI's name of `completion_token_count`."""
        return self.completion_token_count

    @property
    def total_tokens(self) -> int:
        return self.prompt_token_count + self.completion_token_count


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """What has come since the chunk before.

    Attributes:
        request_id: The id of the request.
        text: New text; may be empty, and may lag behind the tokens.
        token_ids: New tokens.
        logprobs: One for each new token if they were asked for, otherwise empty.
        prompt_token_count: Tokens of the prompt.
        finish_reason: Why it ended; None in all chunks but the last.
        matched_stop: The stop string or token that ended it, if one did.
        usage: In the last chunk only.
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
        text: All of its text.
        token_ids: All generated tokens.
        logprobs: One for each token if they were asked for, otherwise empty.
        finish_reason: STOP or LENGTH; everything else is raised as an error.
        matched_stop: The stop string or token that ended it, if one did.
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
        worker_id: Its name, stable over restarts.
        incarnation: Number of its process's life.
        address: host:port of its gRPC server.
        group_id: The group it serves in.
        connected: Whether the dispatcher has its stream to the worker's group.
        load: Its last load report; None before the first. Only leaders of groups report to dispatchers, for the whole
            group; the memory in the report is the leader's own.
    """

    worker_id: str
    incarnation: int
    address: str
    group_id: str
    connected: bool
    load: LoadReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """Workers that hold one complete copy of the model together and serve as a pipeline. Most groups have one member.

    Attributes:
        group_id: Its name; another one after every change of its members.
        members: Stages in order, each with its layers; the first is the leader.
        workers: The same workers, as the dispatcher sees them; None for one of which it says nothing.
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
        """The whole group's: its blocks are those that every stage has."""
        return self.leader.load if self.leader is not None else None

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits; 0 before the first report."""
        return self.load.block_count * self.load.block_tokens if self.load is not None else 0

    @property
    def used_tokens(self) -> int:
        """Room held by running requests."""
        return self.load.used_block_count * self.load.block_tokens if self.load is not None else 0

    @property
    def demand_tokens(self) -> int:
        """Room that running requests hold and waiting ones need."""
        waiting = self.load.waiting_block_count * self.load.block_tokens if self.load is not None else 0
        return self.used_tokens + waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentTimes:
    """How the requests of one dispatcher have fared lately. Quantiles are 0 where nothing was measured.

    Attributes:
        window_s: The length of "lately".
        first_token_count: Requests whose first token came in it.
        ttft_p50_s: Time to the first token.
        ttft_p99_s: Time to the first token.
        tpot_p50_s: Time for each token after the first, of requests that have ended in it and of those that run.
        tpot_p99_s: The same.
        longest_wait_s: For how long the request that waits longest for its first token has been waiting.
        generated_tokens_total: Tokens that came for clients since the dispatcher started.
        replays_total: Requests started anew after their worker was lost, since the dispatcher started.
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
    """Something that happened to a request.

    Attributes:
        at_s: Since its arrival.
        what: waiting, placed, moved, moving, stranded, first_token, resumed, lost, sent_back, recalled or taken_over.
        worker_id: The worker it happened at; may be empty.
        detail: More in words; may be empty.
        token_count: Tokens of the answer by then.
        gap_s: Of `resumed`: time since the token before.
    """

    at_s: float
    what: str
    worker_id: str = ""
    detail: str = ""
    token_count: int = 0
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """When a request came, and how long it was.

    Attributes:
        arrived_unix_s: By the dispatcher's clock.
        prompt_token_count: Tokens of the prompt.
        completion_token_count: Tokens generated.
        priority: Its class.
    """

    arrived_unix_s: float
    prompt_token_count: int
    completion_token_count: int
    priority: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequests:
    """Requests that have ended at one dispatcher since it was asked before.

    Attributes:
        requests: In the order in which they ended; those without a token are left out.
        last: Where to go on.
        forgotten_count: More that have ended since, and are not remembered any more.
        oldest_open_unix_s: When the oldest request came that is being served; None: there is none.
    """

    requests: tuple[EndedRequest, ...]
    last: int
    forgotten_count: int
    oldest_open_unix_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStory:
    """What has become of a request, as the dispatcher that owned it remembers.

    Attributes:
        request_id: Its id.
        dispatcher_id: Who tells.
        state: queued, running, moving, or how it ended: stop, length, cancelled, deadline, error, refused, invalid.
        error: What went wrong; empty if nothing did.
        age_s: Since its arrival; of one that has ended, since its end.
        priority: Its class.
        caller: The name of the token it came with, or the address of the connection.
        prompt_token_count: Tokens of the prompt.
        completion_token_count: Tokens generated so far.
        max_token_count: The most that were asked for.
        queue_s: Time in the backlog.
        ttft_s: Time to the first token; None: there was none.
        tpot_s: Time for each token after the first; None: there was none.
        e2e_s: From its arrival to its end, or to now.
        replay_count: How often it was started anew because its worker was lost.
        move_count: How often another worker went on with it.
        recall_count: How often it was taken back from a full worker for one that had room.
        longest_gap_s: The longest time between two of its tokens.
        longest_gap_token_count: Tokens that had come before that gap.
        moments: What happened, oldest first.
        left_out_moment_count: Moments beyond those that are remembered.
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
        dispatcher_id: Who answered.
        address: Where it was asked.
        version: Its version of Ballast.
        layout: Groups and layer ranges; None before the first.
        model: What is served; None before the first worker.
        workers: All workers of the layout.
        backlog_request_count: Requests that wait in this dispatcher.
        backlog_token_count: Their prompt tokens.
        offline_queued_count: Offline requests that wait in this dispatcher for a worker to ask for them.
        running_request_count: Requests of this dispatcher that workers hold.
        max_queued_request_count: Bound of the backlog.
        max_queued_token_count: Bound of the backlog.
        requests_total: Ending -> count since the dispatcher started.
        draining: Whether it refuses new requests.
        uptime_s: Age of the dispatcher.
        state_server_reachable: Whether the state server answered last time.
        planner_address: host:port of the active planner; empty while the dispatcher knows of none.
        recent: How its requests have fared lately.
        kept_out: Workers that are put into no group for now, and why.
        waiting_by_caller: Requests that wait in this dispatcher, of the callers with the most; for operators.
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
        """The layout's groups with what is known about their workers; empty before the first layout."""
        known = {(worker.worker_id, worker.incarnation): worker for worker in self.workers}
        return tuple(
            GroupStatus(
                group_id=group.group_id,
                members=group.members,
                workers=tuple(known.get((m.worker_id, m.incarnation)) for m in group.members),
            )
            for group in (self.layout.groups if self.layout is not None else ())
        )
