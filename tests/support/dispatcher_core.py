"""Shorthand for tests of the dispatcher's core. `Story` checks all invariants after every event."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, TypeVar

from ballast.common.ids import DispatcherId, Epoch, GroupId, Incarnation, RequestId, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.model import ModelInfo
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from services.dispatcher.core.dispatcher import DispatcherCore
from services.dispatcher.core.events import (
    Command,
    Deliver,
    Ending,
    Event,
    Fail,
    Finish,
    LayoutChanged,
    PlaceOnWorker,
    Refuse,
    Request,
    RequestSubmitted,
    StepReceived,
    WorkerConnected,
    WorkerLost,
)
from services.dispatcher.core.fleet import Worker
from services.dispatcher.core.limits import Limits
from services.dispatcher.core.placement import PlacementRules
from services.dispatcher.policy.freeness import RoutingRules, WorkerKey, WorkerView

BLOCK_TOKENS = 16
MODEL = ModelInfo(
    name="m",
    architecture="a",
    layer_count=4,
    vocab_size=1000,
    max_model_len=4096,
    dtype="float32",
    parameter_count=1,
    kv_bytes_per_token=1,
    eos_token_ids=(0,),
)

C = TypeVar("C", bound=Command)
_P = ParamSpec("_P")


def key(name: str, incarnation: int = 1) -> WorkerKey:
    return WorkerKey(WorkerId(name), Incarnation(incarnation))


def load(**changes: int | bool) -> LoadReport:
    """The report of an idle worker: 64 blocks of 16 tokens, at most 8 running requests and an unbounded queue."""
    idle = LoadReport(
        block_tokens=BLOCK_TOKENS,
        block_count=64,
        used_block_count=0,
        waiting_block_count=0,
        running_count=0,
        waiting_count=0,
        max_running_count=8,
        steps_total=0,
        preemptions_total=0,
        prompt_tokens_total=0,
        generation_tokens_total=0,
        step_age_s=0.0,
        draining=False,
        memory=MemoryReport(budget_bytes=0, parameter_bytes=0, kv_bytes=0, free_bytes=0),
    )
    return replace(idle, **changes)


def view_of(load: LoadReport) -> WorkerView:
    """Routing's view of a worker that sent this report and has received no request since."""
    worker = Worker(key=key("w"), address="", group_id="", connected=True, load=load, max_waiting_count=8)
    return worker.view()


FULL = load(used_block_count=64, running_count=8)


def layout(epoch: int, *workers: WorkerKey, draining: Sequence[WorkerKey] = ()) -> Layout:
    groups = tuple(
        Group(
            GroupId(f"g-{w.worker_id}"),
            (Member(w.worker_id, w.incarnation, f"{w.worker_id}:1", 0, 4, draining=w in draining),),
        )
        for w in workers
    )
    return Layout(Epoch(epoch), 4, groups, "test")


def merged(epoch: int, *groups: Sequence[WorkerKey], draining: Sequence[WorkerKey] = ()) -> Layout:
    """A layout of groups with their members in stage order, each with a share of the layers."""
    return Layout(Epoch(epoch), 4, tuple(_group(group, draining) for group in groups), "overload")


def _group(workers: Sequence[WorkerKey], draining: Sequence[WorkerKey]) -> Group:
    ends = [4 * (index + 1) // len(workers) for index in range(len(workers))]
    members = [
        Member(w.worker_id, w.incarnation, f"{w.worker_id}:1", first, last, draining=w in draining)
        for w, first, last in zip(workers, [0, *ends], ends, strict=False)
    ]
    return Group(GroupId("g-" + "-".join(w.worker_id for w in workers)), tuple(members))


def request(
    name: str,
    *,
    prompt: int = 16,
    max_tokens: int = 16,
    priority: PriorityClass = PriorityClass.DEFAULT,
    deadline_at_s: float = 1000.0,
    logprobs: int | None = None,
    answer: Sequence[int] = (),
    taken_over: bool = False,
    begins: int = 1,
    caller: str = "",
) -> Request:
    """A request. `begins`: the id of every prompt token. `answer`: tokens already generated at another dispatcher, one
    character each.
    """
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=(begins,) * prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, logprobs=logprobs),
        priority=priority,
        deadline_at_s=deadline_at_s,
        output_token_ids=answer,
        text_chars=len(answer),
        taken_over=taken_over,
        caller=caller,
    )


@dataclass
class Answer:
    """The commands that an event caused."""

    commands: Sequence[Command]

    def of(self, kind: type[C]) -> list[C]:
        return [command for command in self.commands if isinstance(command, kind)]

    @property
    def places(self) -> list[tuple[str, str]]:
        return [(p.request.request_id, p.worker.worker_id) for p in self.of(PlaceOnWorker)]

    @property
    def errors(self) -> dict[str, str]:
        ended = [*self.of(Fail), *self.of(Refuse)]
        return {command.request_id: type(command.error).__name__ for command in ended}


def _submission_of(make: Callable[_P, Request]) -> Callable[Concatenate["Story", _P], Answer]:
    """A method that submits the request that `make` returns for its arguments."""

    def submit(story: "Story", *args: _P.args, **named: _P.kwargs) -> Answer:
        return story.handle(RequestSubmitted(story.now_s, make(*args, **named)))

    return submit


class Story:
    """A dispatcher's core with a clock. Reports are those of idle workers unless given."""

    def __init__(
        self,
        *workers: str,
        limits: Limits | None = None,
        placement: PlacementRules | None = None,
        routing: RoutingRules | None = None,
    ) -> None:
        self.core = DispatcherCore(
            DispatcherId("d0"),
            limits or Limits(),
            placement or PlacementRules(),
            routing or RoutingRules(growth_tokens=0),
        )
        self.now_s = 0.0
        self.epoch = 0
        if workers:
            self.adopt(*map(key, workers))
            for worker in workers:
                self.connect(worker)

    def handle(self, event: Event) -> Answer:
        answer = Answer(self.core.handle(event))
        self.core.check()
        return answer

    def adopt(self, *workers: WorkerKey, draining: Sequence[WorkerKey] = ()) -> Answer:
        self.epoch += 1
        return self.handle(LayoutChanged(self.now_s, layout(self.epoch, *workers, draining=draining)))

    def adopt_groups(self, *groups: Sequence[WorkerKey], draining: Sequence[WorkerKey] = ()) -> Answer:
        """Adopts a layout of these groups, each with its leader first."""
        self.epoch += 1
        return self.handle(LayoutChanged(self.now_s, merged(self.epoch, *groups, draining=draining)))

    def merge(self, *groups: str) -> Answer:
        """Adopts a layout of these groups; "ab" means that worker a leads worker b."""
        return self.adopt_groups(*([key(name) for name in group] for group in groups))

    def move(self, worker: str, name: str, to: str) -> Answer:
        """`worker` reports that it has handed the request over to `to`."""
        return self.step(worker, endings=[Ending(self.handle_of(name), None, moved_to=to)])

    def connect(self, worker: str, report: LoadReport | None = None, *, incarnation: int = 1) -> Answer:
        return self.handle(
            WorkerConnected(self.now_s, key(worker, incarnation), MODEL, report or load(), max_waiting_count=100)
        )

    def lose(self, worker: str, *, incarnation: int = 1) -> Answer:
        return self.handle(WorkerLost(self.now_s, key(worker, incarnation), "connection reset"))

    submit = _submission_of(request)

    def handle_of(self, name: str) -> int:
        return self.core.requests[RequestId(name)].handle

    def step(
        self,
        worker: str,
        tokens: dict[str, Sequence[int]] | None = None,
        *,
        endings: Sequence[Ending] = (),
        report: LoadReport | None = None,
        seen_handle: int | None = None,
        texts: Sequence[str] = (),
        logprobs: Sequence[object] = (),
        preempted: Sequence[str] = (),
        resumed: Sequence[str] = (),
        marks: Sequence[int] = (),
        incarnation: int = 1,
    ) -> Answer:
        """Sends a worker's report of a step. `tokens`: new tokens by request name. Unless `seen_handle` is given, the
        report covers every placement.
        """
        by_handle = {self.handle_of(name): ids for name, ids in (tokens or {}).items()}
        return self.raw_step(
            worker,
            by_handle,
            endings=endings,
            report=report,
            seen_handle=seen_handle,
            texts=texts,
            logprobs=logprobs,
            preempted=[self.handle_of(name) for name in preempted],
            resumed=[self.handle_of(name) for name in resumed],
            marks=marks,
            incarnation=incarnation,
        )

    def raw_step(
        self,
        worker: str,
        tokens: Mapping[int, Sequence[int]],
        *,
        endings: Sequence[Ending] = (),
        report: LoadReport | None = None,
        seen_handle: int | None = None,
        texts: Sequence[str] = (),
        logprobs: Sequence[object] = (),
        preempted: Sequence[int] = (),
        resumed: Sequence[int] = (),
        marks: Sequence[int] = (),
        incarnation: int = 1,
    ) -> Answer:
        return self.handle(
            StepReceived(
                self.now_s,
                key(worker, incarnation),
                list(tokens),
                [len(ids) for ids in tokens.values()],
                [token_id for ids in tokens.values() for token_id in ids],
                texts,
                logprobs,
                endings,
                report or load(),
                1 << 60 if seen_handle is None else seen_handle,
                preempted,
                resumed,
                marks,
            )
        )

    def finish(self, worker: str, name: str, report: LoadReport | None = None) -> Answer:
        return self.step(worker, endings=[Ending(self.handle_of(name), FinishReason.LENGTH)], report=report)


def delivered(answers: Sequence[Answer], name: str) -> list[int]:
    """All tokens delivered to a client, in order."""
    return [t for answer in answers for d in answer.of(Deliver) if d.request_id == name for t in d.token_ids]


def finishes(answer: Answer) -> dict[str, str]:
    return {command.request_id: command.finish_reason.value for command in answer.of(Finish)}
