"""Measures how fast Ballast computes and serves on this GPU, relative to the limits of memory and matrix units, and
writes one page.

    python -m benchmarks.gpu_pace [--shape 8b] [--out out/gpu_pace.md] [--only decode sample prompt drop serve]

The model has random weights and is first written to `--folder` (16 GB for 8b; /dev/shm is fast). With `--shape tiny
--device cpu` it runs on any machine. In `serve` two workers share the GPU, so links use TCP.
"""

import argparse
import asyncio
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from ballast.client import AsyncClient, SamplingParams
from services.worker.core.batch import Batch, NewSequence, Slice
from services.worker.engine.kv_dtype import KV_CACHE_DTYPES
from services.worker.engine.load import Engine, load_engine
from services.worker.engine.rehearsal import Largest
from tools.local.cluster import LocalCluster
from tools.model.tokenizer import write_tokenizer

PARTS = ("decode", "sample", "prompt", "drop", "serve")
_TEXT_TOKENS = 512  # tokens of the vocabulary that have text; the others have negligible probability


@dataclass(frozen=True, slots=True)
class PaceShape:
    """Shape of a Llama model, and the sizes at which to measure it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    memory_bytes: int  # of one engine
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    loads: tuple[int, ...]  # concurrent requests
    lengths: tuple[int, int]  # (prompt, answer)
    dropped_bytes: str


SHAPES = {
    "8b": PaceShape(
        4096, 14336, 32, 32, 8, 128256, 60 << 30, (1, 16, 64, 256), (1024, 4096), (512, 2048, 8192), (1, 16, 64, 192),
        (512, 128), "6GiB",
    ),
    "tiny": PaceShape(64, 192, 4, 4, 2, 512, 24 << 20, (1, 4), (64,), (48,), (1, 4), (32, 24), "64KiB"),
}  # fmt: skip


def write_random(folder: Path, shape: PaceShape, device: torch.device) -> None:
    """Write a checkpoint with random weights, generated on the device, and a tokenizer."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head_dim = shape.hidden // shape.heads
    kv_width = shape.kv_heads * head_dim
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 16384, "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."), "bos_token_id": 1, "eos_token_id": 2,
        "attention_bias": False, "mlp_bias": False, "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "head_dim": head_dim,
        "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, _TEXT_TOKENS, qwen=False, max_len=16384)

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, device=device, dtype=dtype) * (gain / math.sqrt(columns))).cpu()

    hidden, files = shape.hidden, dict[str, str]()
    ones = torch.ones(hidden, dtype=dtype)

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    head = linear(shape.vocab, hidden, 4.0)
    head[_TEXT_TOKENS:] = 0
    embedding = linear(shape.vocab, hidden, math.sqrt(hidden))
    ends = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": ones.clone()}
    save("ends.safetensors", ends)
    for layer in range(shape.layers):
        of_layer = {
            "input_layernorm": ones.clone(),
            "post_attention_layernorm": ones.clone(),
            "self_attn.q_proj": linear(hidden, hidden, 1.7),
            "self_attn.k_proj": linear(kv_width, hidden, 1.7),
            "self_attn.v_proj": linear(kv_width, hidden),
            "self_attn.o_proj": linear(hidden, hidden, 1.5),
            "mlp.gate_proj": linear(shape.intermediate, hidden),
            "mlp.up_proj": linear(shape.intermediate, hidden),
            "mlp.down_proj": linear(hidden, shape.intermediate, 1.5),
        }
        save(f"layer{layer}.safetensors", {f"model.layers.{layer}.{k}.weight": v for k, v in of_layer.items()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


# ------------------------------------------------------------ limits of the device


@dataclass(frozen=True, slots=True)
class Ceilings:
    read_bytes_per_s: float
    flop_per_s: float

    @classmethod
    def of(cls, device: torch.device) -> "Ceilings":
        size, side = (2 << 30, 8192) if device.type == "cuda" else (64 << 20, 512)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        memory = torch.randn(size // 4, device=device)
        other = torch.empty_like(memory)
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        copy_s = seconds(lambda: other.copy_(memory), device)
        return cls(2 * size / copy_s, 2 * side**3 / seconds(lambda: a @ b, device))


def seconds(act: Callable[[], object], device: torch.device, rounds: int = 12) -> float:
    """Median time of an operation until the device has finished, after two warm-up runs."""
    times_s: list[float] = []
    for _ in range(rounds + 2):
        began_s = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s[2:])


# ------------------------------------------------------------ one engine


class Decodes:
    """Context manager with sequences of one length that decode step by step."""

    def __init__(self, engine: Engine, rows: int, context: int, sampling: SamplingParams | None = None) -> None:
        self._engine = engine
        self._steps = itertools.count()
        first = engine.memory.kv.window.first_block
        width = -(-(context + 64) // engine.block_tokens)
        self.fits = rows * width <= engine.block_count
        self._tables = [tuple(range(first + i * width, first + (i + 1) * width)) for i in range(rows)]
        self._position, self._tokens = context - 1, [7 + i % 100 for i in range(rows)]
        self._sampling = sampling or SamplingParams(temperature=0.0)

    def __enter__(self) -> "Decodes":
        rows = range(len(self._tokens))
        added = tuple(NewSequence(i, (7,) * 32, (), replace(self._sampling, seed=i)) for i in rows)
        self._engine.step(Batch(next(self._steps), (), added, ()), [])
        return self

    def step(self) -> float:
        """Execute one decode step. Returns its duration in seconds."""
        slices = tuple(Slice(i, self._position, (token,), True) for i, token in enumerate(self._tokens))
        began_s = time.perf_counter()
        result = self._engine.step(Batch(next(self._steps), (), (), slices), self._tables)
        took_s = time.perf_counter() - began_s
        self._tokens, self._position = list(result.token_ids), self._position + 1
        return took_s

    def median_s(self, steps: int = 24) -> float:
        for _ in range(4):
            self.step()
        return statistics.median(self.step() for _ in range(steps))

    def __exit__(self, *_: object) -> None:
        self._engine.step(Batch(next(self._steps), tuple(range(len(self._tokens))), (), ()), [])


def read_by_a_step(engine: Engine) -> int:
    """Parameter bytes that a decode step reads: all layers and the head."""
    parameters = engine.memory.parameters
    layers = (t.nbytes for i in range(engine.config.layer_count) for t in parameters.layer(i).values())
    return sum(layers) + parameters.part("head")["weight"].nbytes


def decode_table(engine: Engine, shape: PaceShape, ceilings: Ceilings) -> Iterator[str]:
    yield "| rows | context | step, ms | memory alone, ms | share | tokens/s |"
    yield "|---|---|---|---|---|---|"
    weights = read_by_a_step(engine)
    for context, rows in itertools.product(shape.contexts, shape.rows):
        decodes = Decodes(engine, rows, context)
        if not decodes.fits:
            continue
        with decodes:
            step_s = decodes.median_s()
        kv_bytes = rows * context * engine.info.kv_bytes_per_token
        least_s = (weights + kv_bytes) / ceilings.read_bytes_per_s
        figures = f"{step_s * 1e3:.2f} | {least_s * 1e3:.2f} | {least_s / step_s:.0%} | {rows / step_s:,.0f}"
        yield f"| {rows} | {context:,} | {figures} |"


MIXES = {
    "temperature 1": SamplingParams(),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "top-p 0.95, top-k 50": SamplingParams(top_p=0.95, top_k=50),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "5 log-probabilities": SamplingParams(temperature=0.0, logprobs=5),
    "penalties": SamplingParams(presence_penalty=0.5, repetition_penalty=1.1),
}


def sample_table(engine: Engine, shape: PaceShape) -> Iterator[str]:
    yield "| beyond a greedy step, ms | " + " | ".join(f"{rows} rows" for rows in shape.rows) + " |"
    yield "|---|" + "---|" * len(shape.rows)
    context, greedy = shape.contexts[0], dict[int, float]()
    for rows in shape.rows:
        with Decodes(engine, rows, context) as decodes:
            greedy[rows] = decodes.median_s()
    for name, sampling in MIXES.items():
        cells: list[str] = []
        for rows in shape.rows:
            with Decodes(engine, rows, context, sampling) as decodes:
                cells.append(f"{(decodes.median_s() - greedy[rows]) * 1e3:.2f}")
        yield f"| {name} | " + " | ".join(cells) + " |"


def prompt_table(engine: Engine, shape: PaceShape, ceilings: Ceilings) -> Iterator[str]:
    yield "| tokens of a prompt | behind | ms | share of the matrix units |"
    yield "|---|---|---|---|"
    weights = sum(t.numel() for i in range(shape.layers) for t in engine.memory.parameters.layer(i).values())
    first = engine.memory.kv.window.first_block
    for tokens, behind in (*((chunk, 0) for chunk in shape.chunks), (shape.chunks[0], shape.contexts[-1])):
        table = tuple(range(first, first - (-(behind + tokens) // engine.block_tokens)))
        added = (NewSequence(0, (7,) * 32, (), SamplingParams(temperature=0.0)),)
        engine.step(Batch(0, (), added, ()), [])
        part = Slice(0, behind, tuple(5 + i % 500 for i in range(tokens)), True)
        step = partial(engine.step, Batch(1, (), (), (part,)), [table])
        took_s = statistics.median(_timed(step) for _ in range(6))
        engine.step(Batch(2, (0,), (), ()), [])
        attended = 4 * shape.layers * shape.hidden * tokens * (behind + tokens / 2)
        share = (2 * weights * tokens + attended) / took_s / ceilings.flop_per_s
        yield f"| {tokens:,} | {behind:,} | {took_s * 1e3:.1f} | {share:.0%} |"


def _timed(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def drop_table(engine: Engine, shape: PaceShape) -> Iterator[str]:
    """Lines of a table: how long dropping and restoring half of the layers takes in one engine, in the last of three
    rounds.
    """
    memory = engine.memory
    layers = list(range(shape.layers // 2, shape.layers))
    yield "| what | ms | blocks of KV |"
    yield "|---|---|---|"
    rows: list[tuple[str, float, int]] = []

    def timed(name: str, act: Callable[[], object]) -> None:
        took_s = _timed(act)
        rows.append((name, took_s * 1e3, memory.kv.block_count))

    for _ in range(3):  # only the last round is reported
        rows.clear()
        timed(f"{len(layers)} of {shape.layers} layers are dropped", partial(memory.drop_layers, layers))
        timed("their KV is given up", memory.release_retired)
        room = partial(memory.make_room_for_layers, layers, block_count=memory.leaving_block_count)
        timed("room is made, layers are mapped", room)
        timed("a window is opened", memory.open_window)
        timed("the old one is closed", memory.close_leaving)
    memory.check()
    for name, took_ms, blocks in rows:
        yield f"| {name} | {took_ms:.1f} | {blocks:,} |"
    size = sum(t.nbytes for t in memory.parameters.layer(0).values())
    took_s = min(_timed(lambda: memory.parameters.layer_checksum(0)) for _ in range(3))
    yield f"| checksum of a layer of {size / 1e6:,.0f} MB | {took_s * 1e3:.1f} | |"


# ------------------------------------------------------------ a cluster


@dataclass(slots=True)
class PaceLoad:
    """Concurrent requests, and the arrival times of their tokens."""

    first_s: list[float]
    stamps_s: list[float]
    longest_gap_s: float = 0.0
    tokens: int = 0

    async def request(self, client: AsyncClient, prompt: Sequence[int], answer_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
        last_s = began_s = time.monotonic()
        async for chunk in client.stream(sampling=sampling, token_ids=prompt):
            if not chunk.token_ids:
                continue
            now_s = time.monotonic()
            if last_s == began_s:
                self.first_s.append(now_s - began_s)
            else:
                self.longest_gap_s = max(self.longest_gap_s, now_s - last_s)
            last_s = now_s
            self.stamps_s.append(now_s)
            self.tokens += len(chunk.token_ids)

    def hole_s(self, since_s: float, until_s: float) -> float:
        """Longest time without a token of any request, from half a second before `since_s` to half a second after
        `until_s`.
        """
        inside = [t for t in sorted(self.stamps_s) if since_s - 0.5 <= t <= until_s + 0.5]
        return max((b - a for a, b in itertools.pairwise(inside)), default=0.0)


def _prompts(count: int, length: int) -> list[list[int]]:
    return [[10 + (7 * i + 13 * j * (i + 3)) % 490 for j in range(length)] for i in range(count)]


async def serve(folder: Path, shape: PaceShape, device: torch.device, log_dir: Path) -> list[str]:
    worker = ["--max-model-len", "4096" if shape.layers > 4 else "512"]
    if device.type == "cuda":
        worker += ["--device", str(device), "--transport", "tcp"]
    prompt_tokens, answer_tokens = shape.lengths
    lines = ["| requests at once | tokens/s | first token, median, ms | longest gap, ms |", "|---|---|---|---|"]
    began_s = time.monotonic()
    cluster = LocalCluster(
        folder,
        device_memory_bytes=shape.memory_bytes // 2,
        flags={"worker": worker},
        log_dir=log_dir,
        start_timeout_s=240,
    )
    async with cluster, AsyncClient(cluster.address) as client:
        ready_s = time.monotonic() - began_s
        for count in shape.loads:
            load = PaceLoad([], [])
            took_s = await _run(load, client, _prompts(count, prompt_tokens), answer_tokens)
            first_ms = statistics.median(load.first_s) * 1e3
            lines.append(f"| {count} | {load.tokens / took_s:,.0f} | {first_ms:.0f} | {load.longest_gap_s * 1e3:.0f} |")
        lines += ["", f"Two workers were ready after {ready_s:.1f} s."]
        load, count = PaceLoad([], []), shape.loads[-2]
        task = asyncio.create_task(_run(load, client, _prompts(count, prompt_tokens), answer_tokens * 8))
        await asyncio.sleep(1.5)
        words = ("drop", "--bytes", shape.dropped_bytes, "--hold", "1m"), ("restore",)
        for what in words:
            at_s = time.monotonic()
            code, said = await _ballast(cluster.address, *what)
            ended_s = time.monotonic()
            hole_ms = load.hole_s(at_s, ended_s) * 1e3
            lines.append(
                f"- `ballast {what[0]}` under {count} requests: exit {code} after {ended_s - at_s:.1f} s, no token of"
                f" anybody's for {hole_ms:.0f} ms at most. {said}"
            )
            await asyncio.sleep(1.5)
        await task
        load, count = PaceLoad([], []), shape.loads[1]
        took_s = await _run(load, client, _prompts(count, prompt_tokens), answer_tokens)
        lines.append(f"- Afterwards, with {count} requests: {load.tokens / took_s:,.0f} tokens/s.")
    return lines


async def _run(load: PaceLoad, client: AsyncClient, prompts: Sequence[Sequence[int]], answer_tokens: int) -> float:
    began_s = time.monotonic()
    await asyncio.gather(*(load.request(client, prompt, answer_tokens) for prompt in prompts))
    return time.monotonic() - began_s


async def _ballast(address: str, *words: str) -> tuple[int | None, str]:
    """Run a `ballast` command. Returns its exit status and the last line of its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tools.cli.main", words[0], "--address", address, *words[1:],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    return process.returncode, (out.decode().strip().splitlines() or [""])[-1]


# ------------------------------------------------------------ one page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/ballast-gpu-pace"))
    parser.add_argument("--out", type=Path, default=Path("out/gpu_pace.md"))
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    shape, device, only = SHAPES[arguments.shape], torch.device(arguments.device), arguments.only
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU; --shape tiny --device cpu shows that the program runs")
        return 2
    lines = [f"# The pace of a GPU: Llama of the shape {arguments.shape}", ""]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def say(*more: str) -> None:
        lines.extend(more)
        print("\n".join(more), flush=True)
        arguments.out.write_text("\n".join(lines) + "\n")

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "a CPU"
    say(f"{name}, torch {torch.__version__}, Python {platform.python_version()}.")
    folder = arguments.folder / arguments.shape
    if not (folder / "model.safetensors.index.json").exists():
        say(f"Checkpoint of random weights made in {_timed(lambda: write_random(folder, shape, device)):.1f} s.")
    if only != ["serve"]:
        _one_engine(folder, shape, device, only, arguments.kv_cache_dtype, say)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if "serve" in only:
        say("", "## Served by two workers of this device", "")
        say(*asyncio.run(serve(folder, shape, device, arguments.out.parent / "logs")))
    return 0


def _one_engine(
    folder: Path,
    shape: PaceShape,
    device: torch.device,
    only: Sequence[str],
    kv_cache_dtype: str,
    say: Callable[..., None],
) -> None:
    ceilings = Ceilings.of(device)
    memory, units = ceilings.read_bytes_per_s / 1e9, ceilings.flop_per_s / 1e12
    say(f"It copies {memory:,.0f} GB/s (read and written) and multiplies with {units:,.1f} TFLOP/s.", "")
    began_s = time.perf_counter()
    largest = Largest(max(shape.chunks), max(shape.rows)) if device.type == "cuda" else None
    with load_engine(
        folder,
        device=str(device),
        device_memory_bytes=shape.memory_bytes,
        largest=largest,
        kv_cache_dtype=kv_cache_dtype,
    ) as engine:
        kv_tokens = engine.block_count * engine.block_tokens
        say(f"Loaded in {time.perf_counter() - began_s:.1f} s: {kv_tokens:,} tokens of KV.")
        tables: dict[str, Callable[[], Iterator[str]]] = {
            "decode": lambda: decode_table(engine, shape, ceilings),
            "sample": lambda: sample_table(engine, shape),
            "prompt": lambda: prompt_table(engine, shape, ceilings),
            "drop": lambda: drop_table(engine, shape),
        }
        titles = {"decode": "Decodes", "sample": "Sampling", "prompt": "Prompts", "drop": "Drop and restore"}
        for part, table in tables.items():
            if part in only:
                say("", f"## {titles[part]}", "")
                for line in table():
                    say(line)


if __name__ == "__main__":
    sys.exit(main())
