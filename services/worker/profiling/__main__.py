"""`python -m services.worker.profiling`, started by `ballast profile`. It prints JSON, one object per line.

Lines: {"done": n, "total": n, "what": text} while it measures; at the end {"written": path} or {"error": text, "path":
text}, the latter with exit status 2.
"""

import argparse
import json
import sys
from pathlib import Path

from ballast.common.errors import BallastError, ConfigError
from ballast.service.logs import configure
from services.worker.cost_profile import CostProfile, write_profile
from services.worker.engine.choice import choose_model
from services.worker.engine.load import DEFAULT_BLOCK_TOKENS, Engine, load_engine
from services.worker.profiling.build import build_profile
from services.worker.profiling.measure import Options, measure

_WRONG = 2
_SLACK = 1.2  # allows for rounding of extents and of blocks per sequence
_LEAST_BYTES = 64 << 20


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.worker.profiling", description=__doc__)
    defaults = Options()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--layers", type=int, nargs="*", default=[])
    parser.add_argument("--max-num-batched-tokens", type=int, default=defaults.batch_tokens)
    parser.add_argument("--max-num-seqs", type=int, default=defaults.sequences)
    parser.add_argument("--rounds", type=int, default=defaults.visits)
    parser.add_argument("--seconds", type=float)
    return parser


def _load(arguments: argparse.Namespace, options: Options) -> Engine:
    """Load the engine with enough memory for the largest batch."""
    served, _ = choose_model(
        arguments.model,
        model_impl="auto",
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        device=arguments.device,
        kernels=arguments.kernels,
    )
    kv_tokens = options.kv_tokens + 32 * options.sequences
    needs = served.needs(DEFAULT_BLOCK_TOKENS)
    needed_bytes = needs.least_bytes(0, -(-kv_tokens // DEFAULT_BLOCK_TOKENS))
    return load_engine(
        arguments.model,
        device_memory_bytes=int(needed_bytes * _SLACK) + _LEAST_BYTES,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        device=arguments.device,
        threads=arguments.threads,
        kernels=arguments.kernels,
    )


def _run(arguments: argparse.Namespace) -> CostProfile:
    options = Options(
        batch_tokens=arguments.max_num_batched_tokens,
        sequences=arguments.max_num_seqs,
        visits=arguments.rounds,
        layer_counts=tuple(arguments.layers),
        seconds=arguments.seconds,
    )
    with _load(arguments, options) as engine:
        measured = measure(engine, options, lambda done, total, what: _say(done=done, total=total, what=what))
        _say(done=1, total=1, what="link, remapping, copies")
        return build_profile(engine, measured)


def main() -> int:
    configure(service="profiling", instance="profiling", level="warning", form="console")
    arguments = _parser().parse_args()
    try:
        write_profile(arguments.out, _run(arguments))
    except ConfigError as error:
        _say(error=error.why, path=error.path)
        return _WRONG
    except BallastError as error:
        _say(error=str(error), path="")
        return _WRONG
    _say(written=str(arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
