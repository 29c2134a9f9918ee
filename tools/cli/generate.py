"""`ballast generate`: completes one prompt and prints the answer as it arrives."""

import argparse
import dataclasses
import json
import sys

from ballast.client import Client, GenerationChunk, Usage
from ballast.common.errors import InvalidRequest
from tools.cli.arguments import Commands, add_address, add_sampling, sampling_of


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("generate", help="complete one prompt")
    parser.set_defaults(run=run)
    parser.add_argument("prompt", nargs="?", help="prompt; if absent or -, read from standard input")
    parser.add_argument("--token-ids", metavar="IDS", help="prompt as comma-separated token ids")
    parser.add_argument("--chat", action="store_true", help="apply the chat template: the prompt is a user message")
    parser.add_argument("--request-id", metavar="ID", help="id of the request, for logs and cancelling")
    parser.add_argument("--json", action="store_true", help="print the whole result as one JSON object, at the end")
    parser.add_argument(
        "--usage", action="store_true", help="print token counts and times on standard error, at the end"
    )
    add_address(parser)
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    sampling = sampling_of(args)
    token_ids = _token_ids(args.token_ids) if args.token_ids is not None else None
    prompt = None if token_ids is not None else _prompt(args.prompt)
    messages = [{"role": "user", "content": prompt}] if args.chat and prompt is not None else None
    with Client(args.address, overload_retries=args.overload_retries) as client:
        stream = client.stream(
            None if messages else prompt,
            sampling,
            token_ids=token_ids,
            messages=messages,
            deadline_s=args.deadline_s,
            request_id=args.request_id,
            priority=args.priority,
        )
        with stream:
            if args.json:
                answer = stream.collect()
                print(json.dumps(dataclasses.asdict(answer), ensure_ascii=False, default=_text_of))
                return 0
            last: GenerationChunk | None = None
            try:
                for chunk in stream:
                    last = chunk
                    print(chunk.text, end="", flush=True)
            finally:
                if last is not None:
                    print(flush=True)
    if args.usage and last is not None and last.usage is not None:
        print(describe_usage(last.usage), file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise InvalidRequest for flags that would otherwise be ignored."""
    if args.logprobs is not None and not args.json:
        raise InvalidRequest("--logprobs", "are shown with --json only")
    if args.token_ids is not None and args.prompt is not None:
        raise InvalidRequest("--token-ids", "are the prompt already; leave the text out")


def describe_usage(usage: Usage) -> str:
    rest_s = usage.e2e_s - usage.ttft_s
    per_token = f", then {1000 * rest_s / (usage.completion_token_count - 1):.1f} ms each" if rest_s > 0 else ""
    if usage.completion_token_count < 2:
        per_token = ""
    return (
        f"{usage.prompt_token_count} prompt + {usage.completion_token_count} new tokens;"
        f" first after {1000 * usage.ttft_s:.1f} ms{per_token}; {usage.e2e_s:.3f} s in all; seed {usage.seed}"
    )


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise InvalidRequest("prompt", "give one as an argument, or on standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", f"standard input is not UTF-8 text: {error.reason}") from error


def _text_of(token: bytes) -> str:
    """The text of a token in JSON. Bytes that are only part of a character are replaced."""
    return token.decode(errors="replace")


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidRequest("--token-ids", f"must be whole numbers with commas between, got {text!r}") from error
