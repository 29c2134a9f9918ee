"""`ballast model`: lists cached models, downloads or describes one, makes a small random one, and more."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ballast.common.errors import ConfigError
from ballast.common.units import human_bytes
from ballast.service.models import cached_models, find_model
from services.worker.emulation.machine import write_machine
from services.worker.engine.model_config import read_model_config
from sim.contexts import PAIRS, context_of, table
from sim.hardware import find_gpu
from sim.hardware import find_model as find_spec
from sim.jobs.machines import catalogue_machine
from tools.cli.arguments import Commands, add_json
from tools.cli.output import plain, print_json
from tools.cli.served import check_served, describe, served_lines
from tools.model.info import read_info
from tools.model.safetensors_file import DTYPES
from tools.model.tiny import ARCHITECTURES, PRESETS, TinyShape, write_checkpoint
from tools.model.vocabulary import ensure_tokenizer

_SIZES = {
    "hidden": "hidden size",
    "layers": "number of layers",
    "heads": "number of query heads",
    "kv-heads": "number of KV heads",
    "head-dim": "size of a head (default: hidden / heads)",
    "intermediate": "size of the MLP (default: 8/3 of hidden)",
    "vocab": "vocabulary size, tokenizer included",
    "max-len": "maximum length in tokens",
}
_WHICH = "folder of a Hugging Face checkpoint, or org/name[@revision]"


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "model", help="list, inspect or download models, or create a small one with random weights"
    )
    inner = parser.add_subparsers(dest="model_command", required=True, metavar="WHAT")
    listing = inner.add_parser("list", help="list Hugging Face models in this machine's cache")
    listing.set_defaults(run=run_list)
    fetching = inner.add_parser(
        "fetch", help="download a model from Hugging Face into the cache; creates a missing tokenizer.json"
    )
    fetching.set_defaults(run=run_fetch)
    fetching.add_argument("model", help=_WHICH)
    info = inner.add_parser(
        "info", help="show a checkpoint's implementation, parameters and KV, and the gain of a drop"
    )
    info.set_defaults(run=run_info)
    info.add_argument("model", help=_WHICH)
    tiny = inner.add_parser("make-tiny", help="write a small random checkpoint with a real tokenizer")
    tiny.set_defaults(run=run_make_tiny)
    tiny.add_argument("--arch", choices=list(ARCHITECTURES), default="llama", help="family (llama)")
    tiny.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder; must be empty or absent")
    tiny.add_argument("--preset", choices=list(PRESETS), default="tiny", help="sizes to start from (tiny)")
    for name, text in _SIZES.items():
        tiny.add_argument(f"--{name}", type=int, metavar="N", help=text)
    tiny.add_argument("--tied", action=argparse.BooleanOptionalAction, help="share input and output embedding")
    tiny.add_argument("--dtype", choices=list(DTYPES), default="float32", help="number format (float32)")
    tiny.add_argument("--shards", type=int, default=1, metavar="N", help="number of weight files (1)")
    tiny.add_argument("--seed", type=int, default=0, help="the same arguments give the same bytes (0)")
    emulated = inner.add_parser("emulate", help="write the durations for an emulated worker, for a GPU and a model")
    emulated.set_defaults(run=run_emulate)
    emulated.add_argument("--gpu", required=True, help="GPU of the catalogue, such as A100-40G; or FILE.yaml")
    emulated.add_argument("--model", required=True, help="model of the catalogue, such as Qwen2.5-14B")
    emulated.add_argument("--tokenizer", required=True, metavar="MODEL", help=f"that dispatchers use: {_WHICH}")
    emulated.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="output file, for a worker's --profile"
    )
    context = inner.add_parser(
        "context", help="show the longest context of 1, 2, 3, 4 and 8 instances together, computed from the catalogue"
    )
    context.set_defaults(run=run_context)
    context.add_argument("--model", help="model of the catalogue (default: some pairs of models and GPUs)")
    context.add_argument("--gpu", help="GPU of the catalogue, such as L4; or FILE.yaml")
    context.add_argument(
        "--gpus-per-instance",
        type=int,
        default=0,
        metavar="N",
        help="GPUs of one instance (default: from the catalogue)",
    )
    for one in (listing, fetching, info, tiny, emulated, context):
        add_json(one)


def run_list(args: argparse.Namespace) -> int:
    found = list(cached_models())
    if args.json:
        print_json({"models": [{**plain(one), "folder": str(one.folder)} for one in found]})
        return 0
    for one in found:
        note = "" if one.has_weights else "  (no weights)"
        print(f"{one.name}@{one.revision[:12]}  {human_bytes(one.size_bytes)}{note}")
    if not found:
        print("no model of a hub is in the cache; `ballast model fetch org/name` puts one there")
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    found = find_model(args.model, weights=True, check=check_served)
    ensure_tokenizer(found.folder)
    if args.json:
        print_json({"name": found.name, "folder": str(found.folder)})
    else:
        print(found.folder)
    return 0


def run_emulate(args: argparse.Namespace) -> int:
    tokenizer = find_model(args.tokenizer, weights=False)
    vocab_size = read_model_config(tokenizer.folder).vocab_size
    machine = catalogue_machine(args.gpu, args.model, vocab_size)
    write_machine(args.out, machine)
    if args.json:
        print_json({"machine": machine.name, "model": machine.model.name, "file": str(args.out)})
    else:
        print(f"{machine.model.name} on {machine.name}: {args.out}")
    return 0


def run_context(args: argparse.Namespace) -> int:
    if (args.model is None) != (args.gpu is None):
        raise ConfigError("--model and --gpu", "belong together")
    if args.gpus_per_instance < 0:
        raise ConfigError("--gpus-per-instance", f"must be at least 1, got {args.gpus_per_instance}")
    pairs = PAIRS if args.model is None else ((args.model, args.gpu, args.gpus_per_instance),)
    found = [context_of(find_spec(model), find_gpu(gpu, "--gpu"), count) for model, gpu, count in pairs]
    if args.json:
        print_json({"contexts": [plain(one) for one in found]})
    else:
        print("\n".join(table(found)))
    return 0


def run_info(args: argparse.Namespace) -> int:
    folder = find_model(args.model, weights=False).folder
    if not (folder / "config.json").is_file():
        raise ConfigError(str(folder), "has no config.json, so it is no model")
    if any(folder.glob("*.safetensors")):
        return _show(folder, args)
    told = describe(folder)
    if args.json:
        print_json({**told, "path": str(folder)})
    else:
        _print([("path", str(folder)), *served_lines(told)])
    return 0


def run_make_tiny(args: argparse.Namespace) -> int:
    path = write_checkpoint(args.arch, args.out, _shape(args), seed=args.seed, dtype=args.dtype, shards=args.shards)
    return _show(path, args)


def _show(path: Path, args: argparse.Namespace) -> int:
    info = read_info(path)
    told = describe(path, info)
    if args.json:
        per_token = {"kv_bytes_per_token": info.kv_bytes_per_token(), "parameter_bytes": info.parameter_bytes}
        print_json({**plain(info), "path": str(info.path), **per_token, **told})
        return 0
    own = told.get("served_by") == "ballast"
    _print([*(line for line in info.lines() if own or line[0] != "KV per token"), *served_lines(told)])
    return 0


def _print(lines: Sequence[tuple[str, str]]) -> None:
    for label, value in lines:
        print(f"{label:<15} {value}")


def _shape(args: argparse.Namespace) -> TinyShape:
    """The sizes of the preset, overridden by those given on the command line."""
    names = [field.name for field in dataclasses.fields(TinyShape)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return dataclasses.replace(PRESETS[args.preset], **given)
