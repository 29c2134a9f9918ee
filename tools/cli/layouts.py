"""`ballast plan`, `drop`, `restore` and `transitions`: show and request changes of the layout."""

import argparse
import asyncio
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ballast.common.arguments import seconds, size
from ballast.common.errors import Unavailable
from ballast.common.units import duration, human_bytes, human_duration
from ballast.rpc.codec import LAYOUT
from ballastpb.planner.v1 import planner_pb2 as pb
from tools.cli.arguments import Commands, add_address, add_json
from tools.cli.output import print_json
from tools.cli.planners import Ask, T, ask_planner

if TYPE_CHECKING:
    from ballastpb.planner.v1.planner_pb2_grpc import PlannerServiceAsyncStub

_TIMEOUT_S = 15.0
_POLL_S = 0.1


def add_parser(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="show what the planner would drop now, and why; changes nothing",
        description="Shows what `ballast drop` would do with the same arguments. Changes nothing.",
    )
    plan.set_defaults(run=run_plan)
    plan.add_argument("--explain", action="store_true", help="also show groups, layers and KV")
    plan.add_argument(
        "--bytes", type=size, metavar="SIZE", help="KV memory to free: 1GiB (default: what demand exceeds capacity by)"
    )
    drop = commands.add_parser(
        "drop",
        help="drop replicated layers now to use their memory for KV",
        description="Merges groups into pipelines. Running requests continue and are moved with their KV. Without"
        " --bytes and --workers it frees as much memory as demand exceeds capacity by, and is refused if"
        " no memory is missing. The planner restores the layers when demand has fallen, but not before"
        " --hold has passed.",
    )
    drop.set_defaults(run=run_drop)
    what = drop.add_mutually_exclusive_group()
    what.add_argument(
        "--bytes", type=size, metavar="SIZE", help="KV memory to free: 1GiB (default: what demand exceeds capacity by)"
    )
    what.add_argument("--workers", metavar="A,B", help="merge exactly these workers, in this order")
    drop.add_argument(
        "--hold", type=seconds, default=0.0, metavar="TIME", help="minimum time before a restore: 10m, 2h ..."
    )
    restore = commands.add_parser(
        "restore", help="restore all dropped layers now", description="Dissolves all pipelines, regardless of the load."
    )
    restore.set_defaults(run=run_restore)
    listing = commands.add_parser("transitions", help="list the current and recent drops and restores")
    listing.set_defaults(run=run_transitions)
    listing.add_argument("-v", "--verbose", action="store_true", help="also show groups, layers and bytes of each")
    for parser in (plan, drop, restore, listing):
        add_address(parser)
        parser.add_argument(
            "--planner", metavar="HOST:PORT", help="address of a planner to call directly, not through dispatchers"
        )
        add_json(parser)
    for parser in (drop, restore):
        parser.add_argument("--no-wait", action="store_true", help="return as soon as the plan is in the journal")


def run_plan(args: argparse.Namespace) -> int:
    request = pb.ExplainPlanRequest(required_bytes=args.bytes)
    answer = _ask(args, lambda planner: planner.ExplainPlan(request, timeout=_TIMEOUT_S))
    if args.json:
        numbers = {name: getattr(answer, name) for name in ("required_bytes", "freed_bytes", "shortfall_bytes")}
        layout, predictions = LAYOUT.record(answer.layout), [_message(one) for one in answer.predictions]
        print_json({**numbers, "lines": list(answer.lines), "layout": layout, "predictions": predictions})
    else:
        print("\n".join(_explained(answer) if args.explain else answer.lines[:1]))
    return 0


def _explained(answer: pb.ExplainPlanResponse) -> Iterator[str]:
    yield from answer.lines
    if answer.predictions:
        yield "outcomes of the last decisions:"
    for one in answer.predictions:
        yield f"   {human_duration(one.age_s)} ago, {one.summary}"


def run_drop(args: argparse.Namespace) -> int:
    names: list[str] = args.workers.split(",") if args.workers else []
    request = pb.DropRequest(
        required_bytes=args.bytes,
        worker_ids=names,
        request_id=_new_request_id(),
        hold_s=args.hold,
    )

    async def drop(planner: "PlannerServiceAsyncStub") -> int:
        answer = await planner.Drop(request, timeout=_TIMEOUT_S)
        if not args.json:
            print("\n".join(answer.lines))
        return await _finish(args, planner, answer.epoch, answer.lines)

    return _ask(args, drop)


def run_restore(args: argparse.Namespace) -> int:
    request = pb.RestoreRequest(request_id=_new_request_id())

    async def restore(planner: "PlannerServiceAsyncStub") -> int:
        answer = await planner.Restore(request, timeout=_TIMEOUT_S)
        return await _finish(args, planner, answer.epoch, ())

    return _ask(args, restore)


def run_transitions(args: argparse.Namespace) -> int:
    request = pb.ListTransitionsRequest()
    answer = _ask(args, lambda planner: planner.ListTransitions(request, timeout=_TIMEOUT_S))
    if args.json:
        told = {"overload_policy": answer.overload_policy, "held_s": answer.held_s}
        print_json({**told, "transitions": [_message(one) for one in answer.transitions]})
    elif not answer.transitions:
        print("no drop or restore since this planner became the active one")
    else:
        Console().print(render_transitions(answer, verbose=args.verbose))
    return 0


def render_transitions(answer: pb.ListTransitionsResponse, *, verbose: bool) -> RenderableType:
    # Reasons have a separate table, because they may be sentences, which would leave no room for the figures.
    table, reasons = (Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold") for _ in range(2))
    for heading in ("epoch", "what", "phase"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ago", "took", "parameters", "KV\nmoved", "requests\nmoved", "longest\nstall"):
        table.add_column(heading, justify="right", no_wrap=heading != "ago")
    reasons.add_column("epoch", no_wrap=True)
    reasons.add_column("why")
    for one in answer.transitions:
        took_s = one.prepare_s + one.commit_s + one.exchange_s
        parameters = -one.freed_parameter_bytes if one.kind == "drop" else one.parameter_bytes_pulled
        table.add_row(
            str(one.epoch),
            one.kind,
            Text(one.phase, style="red" if one.phase.startswith("abort") else ""),
            human_duration(one.age_s),
            duration(took_s),
            human_bytes(parameters, signed=True) if parameters else "-",
            human_bytes(one.kv_bytes_exchanged),
            str(one.victim_count),
            duration(one.max_stall_s),
        )
        reasons.add_row(str(one.epoch), Text(one.reason))
    parts: list[RenderableType] = [table, "", reasons]
    if answer.held_s:
        parts.append(Text(f"held: no automatic restore for {human_duration(answer.held_s)}", style="yellow"))
    if verbose:
        for one in answer.transitions:
            parts.append(Text(f"\n{one.epoch}  {one.summary}"))
            if one.HasField("prediction"):
                parts.append(Text(f"{' ' * len(str(one.epoch))}  {one.prediction.summary}"))
    return Group(*parts)


async def _finish(
    args: argparse.Namespace, planner: "PlannerServiceAsyncStub", epoch: int, lines: Sequence[str]
) -> int:
    """Wait for the end of a transition, unless `--no-wait` is given, and print it. Returns the exit status: 1 if it was
    rolled back, else 0. Ctrl-C only ends the waiting.
    """
    if args.no_wait:
        if args.json:
            print_json({"epoch": epoch, "lines": list(lines), "transition": None})
        else:
            print(f"begun: epoch {epoch}; `ballast transitions` shows how it goes")
        return 0
    ended = await _end(planner, epoch)
    if args.json:
        print_json({"epoch": epoch, "lines": list(lines), "transition": _message(ended)})
    else:
        print(f"epoch {ended.epoch}: {ended.kind} {ended.phase}: {ended.summary}")
    return 0 if ended.phase == "done" else 1


async def _end(planner: "PlannerServiceAsyncStub", epoch: int) -> pb.Transition:
    while True:
        answer = await planner.ListTransitions(pb.ListTransitionsRequest(), timeout=_TIMEOUT_S)
        found = next((one for one in answer.transitions if one.epoch == epoch), None)
        if found is None:
            raise Unavailable("planner", f"it has no transition of epoch {epoch}; see `ballast status` for the layout")
        if found.phase in ("done", "aborted"):
            return found
        await asyncio.sleep(_POLL_S)


def _message(message: Message) -> dict[str, Any]:  # Any: JSON values
    """The fields of a message as JSON values; None for an optional field that is not set."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            value = None
        found[field.name] = _message(value) if isinstance(value, Message) else value
    return found


def _ask(args: argparse.Namespace, ask: "Ask[T]") -> T:
    return ask_planner(args.planner or args.address, ask, is_planner=args.planner is not None)


def _new_request_id() -> str:
    return f"cli-{secrets.token_hex(6)}"
