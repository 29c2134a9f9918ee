"""Arguments that several commands share, and their parser."""

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from ballast.common.addresses import default_address
from ballast.common.sampling import PriorityClass, SamplingParams
from tools.cli.access import add_access

if TYPE_CHECKING:
    from argparse import _SubParsersAction  # pyright: ignore[reportPrivateUsage] -- it has no public name

Commands: TypeAlias = "_SubParsersAction[argparse.ArgumentParser]"


class Parser(argparse.ArgumentParser):
    """Argument parser that reports a usage error in one line, without a list of all flags."""

    def error(self, message: str) -> NoReturn:
        print(f"ballast: {message.removeprefix('argument ')} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(2)


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default=default_address(),
        metavar="HOST:PORT",
        help="addresses of dispatchers, comma-separated, tried in turn (default: BALLAST_ADDRESS, or 127.0.0.1:50051)",
    )
    add_access(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output (docs/json.md)")


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the number formats of a simulated model's parameters and KV cache."""
    parser.add_argument(
        "--quantization",
        metavar="FORMAT",
        help="format of the layers' parameters: fp8, int8, w8a16, w4a16 or mxfp4 (default: from config.json, or"
        " bfloat16)",
    )
    parser.add_argument("--kv-cache-dtype", metavar="FORMAT", help="format of KV: fp8 (default: bfloat16)")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="maximum answer length (256)")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="minimum answer length (0)")
    group.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="sampling temperature; 0: greedy (1)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens with this total probability (1)",
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from this number of most likely tokens; 0: all"
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="minimum probability relative to the most likely token (0)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="penalty for repeated tokens; above 1: fewer repetitions (1)",
    )
    group.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="X", help="penalty for tokens that have occurred (0)"
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="penalty for frequent tokens (0)"
    )
    group.add_argument("--seed", type=int, help="the same seed gives the same tokens")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer at this text; may be repeated"
    )
    group.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID", help="end there")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the end-of-sequence token")
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log probabilities of the N most likely tokens at each position",
    )
    group = parser.add_argument_group("request")
    group.add_argument(
        "--priority", choices=[str(c) for c in PriorityClass], default=str(PriorityClass.DEFAULT), help="class"
    )
    group.add_argument(
        "--deadline-s", type=float, metavar="S", help="deadline of the request, after which it is cancelled"
    )
    group.add_argument(
        "--overload-retries",
        type=int,
        default=0,
        metavar="N",
        help="number of retries if refused because of overload (0)",
    )


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Sampling parameters from the command line. Raises InvalidRequest if a value is out of range."""
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
