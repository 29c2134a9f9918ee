"""`ballast model make-tiny` and `ballast model info`."""

import argparse
from dataclasses import fields, replace
from pathlib import Path

from ballast.model.info import read_info
from ballast.model.safetensors_file import DTYPES
from ballast.model.tiny import ARCHITECTURES, PRESETS, TinyShape, write_checkpoint


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:  # pyright: ignore[reportPrivateUsage] -- argparse has no public name for it
    parser = subparsers.add_parser("model", help="make a small random checkpoint, or look into one")
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(dest="model_command", required=True)
    tiny = commands.add_parser("make-tiny", help="write a small random checkpoint with a real tokenizer")
    tiny.add_argument("--arch", choices=list(ARCHITECTURES), default="llama")
    tiny.add_argument("--out", type=Path, required=True, help="folder to write; must be empty or not there")
    tiny.add_argument("--preset", choices=list(PRESETS), default="tiny", help="sizes to start from")
    for name, text in (
        ("hidden", "hidden size"),
        ("layers", "number of layers"),
        ("heads", "number of query heads"),
        ("kv-heads", "number of KV heads"),
        ("head-dim", "size of a head (default: hidden / heads)"),
        ("intermediate", "size of the MLP (default: 8/3 of hidden)"),
        ("vocab", "vocabulary size, tokenizer included"),
        ("max-len", "maximum length in tokens"),
    ):
        tiny.add_argument(f"--{name}", type=int, help=text)
    tiny.add_argument("--tied", action=argparse.BooleanOptionalAction, help="share input and output embedding")
    tiny.add_argument("--dtype", choices=list(DTYPES), default="float32")
    tiny.add_argument("--shards", type=int, default=1, help="number of weight files")
    tiny.add_argument("--seed", type=int, default=0, help="the same arguments give the same bytes")
    info = commands.add_parser("info", help="parameters, bytes and KV per token of a checkpoint")
    info.add_argument("path", type=Path, help="folder of a Hugging Face checkpoint")


def run(args: argparse.Namespace) -> int:
    if args.model_command == "make-tiny":
        path = write_checkpoint(args.arch, args.out, _shape(args), seed=args.seed, dtype=args.dtype, shards=args.shards)
    else:
        path = args.path
    for label, value in read_info(path).lines():
        print(f"{label:<15} {value}")
    return 0


def _shape(args: argparse.Namespace) -> TinyShape:
    """The preset with every size that was given on the command line."""
    names = [field.name for field in fields(TinyShape)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(PRESETS[args.preset], **given)
