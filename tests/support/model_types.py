"""Every model type with a causal or image-text-to-text model in `transformers`: equal, or refused at startup.

    python -m tests.support.model_types --out FILE [--part 1/4]     # compares, and adds a line for each to FILE
    python -m tests.support.model_types --out FILE --write          # writes the results in FILE to docs/your-model.md

Each model is a small random checkpoint of the type's own configuration class, with the known sizes reduced; prompts are
text. Types that remain large, or whose configuration cannot be reduced, are not compared.
"""

import argparse
import contextlib
import importlib.util
import json
import random
import re
import signal
import tempfile
from collections.abc import Generator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ballast.common.errors import ConfigError
from services.worker.engine.choice import choose_model
from services.worker.engine.load import load_engine
from tests.support.engine import Job, generate
from tests.support.families import EXPERTS, PAGE, SMALL, greedy_alone, made_random
from tests.support.reference import NEAR_TIE

_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
_SMALL = SMALL | EXPERTS | _LATENT | {"head_dim": 16, "sliding_window": 16, "rotary_dim": 16}
_SMALL_PARTS = {  # of vision and audio towers
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": SMALL["hidden_size"],
}
_LENGTHS, _TOKENS = (5, 23, 40), 6
_MEMORY_BYTES, _MOST_PARAMETERS = 128 << 20, 48_000_000
_PATIENCE_S = 90
README = Path(__file__).parents[2] / "README.md"
_BEGIN, _END = "<!-- model types begin -->\n", "<!-- model types end -->"
# Model type -> tensor names as `transformers` saves them and as the published checkpoints have them.
_PUBLISHED = {"kimi_k25": ("language_model.model.blocks.", "language_model.model.layers.")}
_WHY = {  # part of an error -> reason as worded on the page
    "keep other state than keys and values": "layers with state other than KV",
    "keeps other state than keys and values": "state other than KV, or attention that bypasses `AttentionInterface`",
    "is neither causal nor a window": "not causal",
    "only decoders are served": "has an encoder",
    "computes other logits for text": "computes other logits for text than its decoder alone",
    "drafts tokens": "drafts tokens for another model",
    "classifies images": "classifies images",
    "attends more than once": "attends more than once in a layer",
    "attends to other rows": "attends to rows other than its own",
    "does not run on packed rows": "its code cannot be run without parameters to find out how it attends",
    "max_position_embeddings": "no `max_position_embeddings`: ALiBi or recurrent layers",
    "num_hidden_layers": "no list of layers",
    "has no list of": "no list of layers",
    "gives other logits": "the self-test finds other logits on packed rows",
    "has no tensor that this is made of": "tensors of other names than its decoder's",
    "is not a tensor of": "tensors of other names than its decoder's",
    "no causal language model class": "no causal language model class in `transformers` for its text decoder",
}


def model_types() -> list[str]:
    from transformers.models.auto import modeling_auto

    texts, images = (
        getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
    )
    return sorted({*texts, *images})


def compare(model_type: str, folder: Path) -> tuple[str, str]:
    """Compares one model type. Returns the outcome ("equal", "refused", "refused at load", "wrong" or "not compared")
    and why.
    """
    try:
        config, cls = small_configuration(model_type)
    except Exception as error:  # noqa: BLE001 many kinds: a configuration that needs others, a missing package
        return "not compared", f"no small configuration: {type(error).__name__}: {str(error)[:100]}"
    config.architectures = [cls.__name__]
    config.save_pretrained(folder)
    try:
        choose_model(folder, model_impl="transformers", dtype="float32", device="cpu", kernels="torch")
    except ConfigError as error:
        if any(part in str(error) for part in ("does not run on packed rows", "cannot make the model")):
            with torch.inference_mode():
                cls(config)(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False)  # raises for wrong sizes
        return "refused", str(error)
    torch.manual_seed(1)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(config).parameters())
    if size > _MOST_PARAMETERS:
        return "not compared", f"{size:,} parameters where it is small"
    made_random(cls(config)).save_pretrained(folder)
    if model_type in _PUBLISHED:
        _rename(folder, *_PUBLISHED[model_type])
    try:
        choose_model(folder, model_impl="transformers", dtype="float32", device="cpu", kernels="torch")
    except ConfigError as error:
        return "refused", str(error)
    return _compare(folder)


def small_configuration(model_type: str) -> tuple[Any, Any]:
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText

    config: Any = AutoConfig.for_model(model_type)
    text = config.get_text_config(decoder=True)
    small = _made_small(text, _SMALL)
    if text is not config and not config.is_encoder_decoder:
        tokens = {key: SMALL["vocab_size"] - 1 for key in vars(config) if key.endswith(("token_id", "token_index"))}
        others = {key: _made_small(part, _SMALL_PARTS) for key, part in vars(config).items() if key in _others(config)}
        [name] = [key for key, part in vars(config).items() if part is text]
        small = type(config)(**{name: small.to_dict()}, **{key: one.to_dict() for key, one in others.items()}, **tokens)
    config = small
    autos = AutoModelForImageTextToText, AutoModelForCausalLM
    return config, next(a._model_mapping[type(config)] for a in autos if type(config) in a._model_mapping)


def _rename(folder: Path, saved: str, published: str) -> None:
    file = folder / "model.safetensors"
    save_file(
        {name.replace(saved, published): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"}
    )


def _others(config: Any) -> set[str]:
    return {key for key in config.sub_configs if getattr(config, key, None) not in (None, config.get_text_config())}


def _made_small(config: Any, sizes: Mapping[str, int]) -> Any:
    known = config.to_dict()
    names = {key: getattr(config, "attribute_map", {}).get(key, key) for key in sizes}
    small = {name: sizes[key] for key, name in names.items() if name in known or key in known}
    if "qk_rope_head_dim" in known:  # heads have two parts with their own sizes
        small = {name: size for name, size in small.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    modeling = importlib.util.find_spec(type(config).__module__.replace(".configuration_", ".modeling_"))
    if modeling is not None and "mrope_section" in Path(str(modeling.origin)).read_text():
        rope: dict[str, Any] = dict(known.get("rope_parameters") or {})
        heads = int(16 * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [heads - 2 * (heads * 3 // 8), heads * 3 // 8, heads * 3 // 8]
        return type(config)(**small, rope_parameters=rope | {"rope_theta": 1e4, "rope_type": "default"})
    return type(config)(**small)


def _compare(folder: Path) -> tuple[str, str]:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(3, 380) for _ in range(length)) for length in _LENGTHS]
    wanted = greedy_alone(folder, prompts, _TOKENS)
    jobs = [Job(i, prompt, _TOKENS) for i, prompt in enumerate(prompts)]
    try:
        with load_engine(
            folder, dtype="float32", device_memory_bytes=_MEMORY_BYTES, model_impl="transformers"
        ) as engine:
            generate(engine, jobs, chunk_tokens=11, seed=1)
            alone = "" if engine.implementation.pipelines else "alone only"
    except ConfigError as error:
        return "refused at load", str(error)
    for job, one in zip(jobs, wanted, strict=True):
        for token, right, gap in zip(job.chosen, one.token_ids, one.gaps, strict=True):
            if token != right:
                if gap < NEAR_TIE:
                    break
                return "wrong", f"{job.chosen} and not {list(one.token_ids)}"
    return "equal", alone


@contextlib.contextmanager
def _patient() -> Generator[None]:
    def over(*_: object) -> None:
        raise TimeoutError(f"more than {_PATIENCE_S} s of processor time")

    signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, _PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def scan(out: Path, part: int, parts: int, types: Sequence[str]) -> None:
    there = {line["type"] for line in _read(out)}
    for model_type in [name for name in types[part - 1 :: parts] if name not in there]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with _patient():
                    verdict, why = compare(model_type, Path(folder))
            except Exception as error:  # noqa: BLE001 modelling code raises anything for unexpected sizes
                verdict, why = "not compared", f"{type(error).__name__}: {str(error)[:120]}"
        with out.open("a") as file:
            file.write(json.dumps({"type": model_type, "verdict": verdict, "why": why.replace(folder, "")}) + "\n")
        print(f"{model_type:28} {verdict:14} {why[-150:]}", flush=True)


def page_of(lines: list[dict[str, str]]) -> str:
    by: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        by.setdefault(line["verdict"], {}).setdefault(_called(line), []).append(line["type"])
    counts = {verdict: sum(map(len, groups.values())) for verdict, groups in by.items()}
    said = [
        f"{len(lines)} of the {len(model_types())} model types of transformers {version('transformers')} that have a",
        "causal language model, or one of text and images, were compared with it as small random checkpoints",
        f"(`make model-types`): {counts.get('equal', 0)} equal,",
        f"{counts.get('wrong', 0)} wrong, {counts.get('refused', 0)} refused before anything starts,",
        f"{counts.get('refused at load', 0)} refused when loaded, {counts.get('not compared', 0)} not compared.",
        "",
    ]
    said += ["| | why | types |", "|---|---|---|"]
    for verdict in ("equal", "wrong", "refused", "refused at load", "not compared"):
        for why, types in sorted(by.get(verdict, {}).items(), key=lambda group: -len(group[1])):
            said.append(f"| {verdict} | {why} | {', '.join(sorted(types))} |")
    return "\n".join(said) + "\n"


def _called(line: dict[str, str]) -> str:
    if line["verdict"] == "not compared":
        return "cannot be made small here"
    if line["verdict"] in ("equal", "wrong"):
        return line["why"] if line["verdict"] == "equal" else ""
    return next((name for part, name in _WHY.items() if part in line["why"]), line["why"].partition(": ")[2][:120])


def _read(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--types", help="a,b,...: compare only these types")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if not args.write:
        part, parts = map(int, args.part.split("/"))
        scan(args.out, part, parts, args.types.split(",") if args.types else model_types())
        return
    lines = _read(args.out)
    served = sum(line["verdict"] == "equal" for line in lines)
    README.write_text(re.sub(r"\d+ of \d+ model types", f"{served} of {len(lines)} model types", README.read_text()))
    text = PAGE.read_text()
    before, after = text.partition(_BEGIN)[0], text.partition(_END)[2]
    PAGE.write_text(f"{before}{_BEGIN}{page_of(lines)}{_END}{after}")


if __name__ == "__main__":
    main()
