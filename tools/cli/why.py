"""`ballast why REQUEST_ID`: explains what happened to a request."""

import argparse
import dataclasses
import json
from collections.abc import Iterator

from ballast.client import Client
from ballast.client.types import RequestMoment, RequestStory
from tools.cli.arguments import Commands, add_address

_ENDINGS = {
    "stop": "ended normally",
    "length": "ended at its maximum length",
    "cancelled": "was cancelled",
    "deadline": "did not end before its deadline",
    "error": "failed",
    "refused": "was refused",
    "invalid": "was invalid",
    "queued": "waits in the backlog",
    "running": "is running",
    "moving": "is moving to another worker",
}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "why",
        help="show the history of a request",
        description="Works for running requests and for recently ended ones. The id is in the answer and in the"
        " dispatcher's access log, or was set by the client.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("request_id", metavar="REQUEST_ID", help="id of the request")
    parser.add_argument("--json", action="store_true", help="print all details as one JSON object")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    with Client(args.address) as client:
        story = client.describe_request(args.request_id)
    print(json.dumps(dataclasses.asdict(story), indent=2) if args.json else "\n".join(tell(story)))
    return 0


def tell(story: RequestStory) -> Iterator[str]:
    """The lines of the explanation."""
    yield f"{story.request_id} {_ENDINGS.get(story.state, story.state)}{_after(story)}"
    if story.error:
        yield f"  {story.error}"
    asked = f"{story.prompt_token_count} prompt tokens, {story.completion_token_count} of {story.max_token_count} new"
    caller = f", from {story.caller}" if story.caller else ""
    yield f"  {asked}; priority {story.priority}{caller}; reported by {story.dispatcher_id}"
    times = [f"queued {_time(story.queue_s)}"] if story.moments else []
    if story.ttft_s is not None:
        times.append(f"first token after {_time(story.ttft_s)}")
    if story.tpot_s is not None:
        times.append(f"then {_time(story.tpot_s)} per token")
    counts = ((story.replay_count, "replay"), (story.move_count, "move"), (story.recall_count, "recall"))
    times += [f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count]
    if times:
        yield "  " + ", ".join(times)
    if story.tpot_s is not None and story.longest_gap_s > 2 * story.tpot_s:
        yield f"  longest time between two tokens: {_time(story.longest_gap_s)}{_where(story)}"
    yield from (f"  {moment.at_s:9.3f} s  {_describe(moment)}" for moment in story.moments)
    if story.left_out_moment_count:
        yield f"             and {story.left_out_moment_count} more changes"


def _after(story: RequestStory) -> str:
    if story.state in ("queued", "running", "moving"):
        return f", {_time(story.age_s)} after its arrival"
    took = f" after {_time(story.e2e_s)}" if story.moments else ""
    return f"{took}, {_time(story.age_s)} ago"


def _where(story: RequestStory) -> str:
    """Description of the longest gap: the token after which it began, and the worker if the request resumed on another
    one.
    """
    count = story.longest_gap_token_count
    for moment in story.moments:
        if moment.what == "resumed" and moment.token_count == count:
            return f", after token {count}, when it moved to {moment.worker_id}"
    return f", after token {count}"


def _describe(moment: RequestMoment) -> str:
    worker, detail = moment.worker_id, moment.detail
    words = {
        "waiting": "waits in the backlog",
        "placed": f"placed on {worker}"
        + (f", to continue after token {moment.token_count}" * bool(moment.token_count)),
        "moved": f"continues on {worker}" + (f" after token {moment.token_count}" * bool(moment.token_count)),
        "moving": f"moved to {worker}, which is not connected yet",
        "stranded": "that worker could not be reached: back to the backlog",
        "first_token": f"first token, from {worker}",
        "resumed": f"token {moment.token_count + 1} from {worker}, {_time(moment.gap_s)} after the previous one",
        "lost": f"lost at {worker}: back to the backlog, with its {moment.token_count} tokens",
        "sent_back": f"{worker} had no room: back to the backlog",
        "taken_over": "taken over from another dispatcher, by its client",
        "recalled": f"recalled from {worker}, which was full, for a worker with room",
    }
    return words.get(moment.what, moment.what) + (f" ({detail})" if detail else "")


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1.0 else f"{seconds:.2f} s"
