"""Describes how a worker would serve a checkpoint, from its config.json: python -m services.worker.engine.describe DIR

Prints one JSON object: the fields of `Description`, or `refused` with the reason. Reads no tensors. For a quantised
model whose weight files are missing, the sizes of the dense model are printed.
"""

import argparse
import dataclasses
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from ballast.common.errors import ConfigError
from ballast.service import logs
from services.worker.engine.choice import MODEL_IMPLS, choose_model
from services.worker.engine.kv_dtype import KV_CACHE_DTYPES, kv_dtype_name
from services.worker.engine.peers import Apart
from services.worker.memory.backend import dtype_name
from services.worker.memory.parameters import lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    served_by: str  # implementation: ballast or transformers
    architecture: str
    dtype: str
    kv_cache_dtype: str  # empty: dtype
    layer_count: int
    max_model_len: int
    parameter_count: int
    quantised: str | None  # number format of quantised parameters
    layer_bytes: int  # all layers together
    other_bytes: int  # embedding, head
    kv_bytes_per_token: int  # over all layers, as stored
    kv_needed_bytes_per_token: int  # KV bytes without padding all layers to slots of equal size
    windowed_layers: int
    attention: tuple[str, ...]  # deviations from plain attention in any layer


def describe_model(
    model_dir: Path, *, model_impl: str = "auto", dtype: str = "auto", ranks: int = 1, kv_cache_dtype: str = "auto"
) -> Description:
    """Describe the model; sizes are per rank.

    Raises:
        ConfigError: a worker would refuse it.
    """
    peers = Apart(0, ranks) if ranks > 1 else None
    served, _ = choose_model(
        model_dir,
        model_impl=model_impl,
        dtype=dtype,
        device="cpu",
        kernels="torch",
        peers=peers,
        kv_cache_dtype=kv_cache_dtype,
    )
    needs = served.needs(block_tokens=1)
    kinds = served.kinds
    element_bytes = needs.kv_shape.dtype.itemsize
    kv_bytes = needs.kv_shape.block_bytes * needs.kv_shape.layer_count
    return Description(
        served_by=served.name,
        architecture=served.config.architecture,
        dtype=dtype_name(served.dtype),
        kv_cache_dtype=kv_dtype_name(needs.kv_shape.dtype, served.dtype),
        layer_count=served.config.layer_count,
        max_model_len=served.config.max_position,
        parameter_count=served.parameter_count,
        quantised=served.quantised,
        layer_bytes=sum(lay_out("layer", part).size_bytes for part in needs.layers),
        other_bytes=sum(lay_out(name, part).size_bytes for name, part in needs.others.items()),
        kv_bytes_per_token=kv_bytes,
        kv_needed_bytes_per_token=sum(kind.token_elements for kind in kinds) * element_bytes if kinds else kv_bytes,
        windowed_layers=sum(kind.window is not None or kind.chunk is not None for kind in kinds),
        attention=tuple(sorted({extra for kind in kinds for extra in kind.extras})),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.worker.engine.describe", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--model-impl", choices=MODEL_IMPLS, default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    logs.configure(service="describe", instance="", level="error", form="json")
    logging.disable(logging.WARNING)
    try:
        found = describe_model(
            args.model,
            model_impl=args.model_impl,
            dtype=args.dtype,
            ranks=args.tensor_parallel_size,
            kv_cache_dtype=args.kv_cache_dtype,
        )
        print(json.dumps(dataclasses.asdict(found)))
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
