"""Arguments that several commands share."""

import argparse
from typing import TYPE_CHECKING, TypeAlias

from ballast.client.aio import default_address
from ballast.common.sampling import PriorityClass, SamplingParams

if TYPE_CHECKING:
    from argparse import _SubParsersAction  # pyright: ignore[reportPrivateUsage] -- it has no public name

Commands: TypeAlias = "_SubParsersAction[argparse.ArgumentParser]"


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default=default_address(),
        metavar="HOST:PORT",
        help="of a dispatcher; several with commas (default: BALLAST_ADDRESS, or 127.0.0.1:50051)",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N")
    group.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: greedy")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--seed", type=int, help="the same seed gives the same tokens")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    group.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID")
    group.add_argument("--ignore-eos", action="store_true", help="go on behind the end-of-sequence token")
    group.add_argument("--logprobs", type=int, metavar="N", help="with --json: the N best alternatives of each token")
    group = parser.add_argument_group("request")
    group.add_argument("--priority", choices=[str(c) for c in PriorityClass], default=str(PriorityClass.DEFAULT))
    group.add_argument("--deadline-s", type=float, metavar="S", help="the request ends by then, finished or not")
    group.add_argument("--overload-retries", type=int, default=0, metavar="N", help="when refused for overload")


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Raises InvalidRequest for values out of range."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
    )
