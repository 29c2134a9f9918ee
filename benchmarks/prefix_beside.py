"""Ballast's prefix caching compared with vLLM's, on the same requests with the same memory, in virtual time:

    python -m benchmarks.prefix_beside [--blocks 2000 4000 8000] [--new-tokens 40 300] [--write]
    PYTHONPATH=.:VLLM python -m benchmarks.prefix_beside ...            # VLLM: where `vllm` can be imported from

The 500 requests are 50 chats of four turns that begin with one of twenty system prompts of 1,000 tokens (Zipf), and 30
agents of ten turns that begin with one of eight prompts of 2,000 tokens. A turn's prompt consists of the previous
prompt, its answer and some new tokens; it arrives a moment after the end of that answer. No model runs: each step lasts
as long as the roofline estimates for Llama-2-7B on an A100-40G. Both systems have blocks of 16 tokens, at most 32
running requests and 2,048 tokens per step. For vLLM, its own `Scheduler` and `KVCacheManager` run, without a GPU.
"""

import argparse
import heapq
import itertools
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from ballast.common.cost import Chunk, CostModel
from ballast.common.ids import RequestId
from ballast.common.sampling import SamplingParams
from benchmarks.offline import CLUSTER, MODEL, quantile
from benchmarks.quoting import quote_run
from services.worker.core.batch import StepResult
from services.worker.core.events import BatchWanted, Execute, SequenceKey, StepDone, StreamOpened, Submitted
from services.worker.core.limits import WorkerLimits
from services.worker.core.worker import WorkerCore
from sim.jobs.machines import catalogue_machine
from tools.model.tiny import make_tiny

PAGE = Path("benchmarks/results/2026-11-27-prefixes.md")
VOCABULARY = 4096
BLOCK_TOKENS, PLACES, STEP_TOKENS, LONGEST = 16, 32, 2048, 32_768
CHATS, AGENTS = 50, 30
_THINK_S = {"chat": 5.0, "agent": 0.5}


@dataclass
class PrefixRequest:
    number: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    asked_s: float = 0.0
    first_token_s: float = 0.0
    token_count: int = 0


@dataclass(frozen=True, slots=True)
class PrefixSession:
    """One chat or agent. `turns`: (new tokens of the prompt, answer) of each turn, in order."""

    begin_s: float
    think_s: float
    turns: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def sessions_of(span_s: float, new_tokens: tuple[int, int], seed: int) -> list[PrefixSession]:
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(count))

    systems, tools = [tokens(1000) for _ in range(20)], [tokens(2000) for _ in range(8)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    made: list[PrefixSession] = []
    for number in range(CHATS + AGENTS):
        kind = "chat" if number < CHATS else "agent"
        (begin,) = rng.choices(systems, weights) if kind == "chat" else rng.choices(tools)
        turns = [
            ((*(begin if turn == 0 else ()), *tokens(rng.randint(*new_tokens))), tokens(rng.randrange(30, 200)))
            for turn in range(4 if kind == "chat" else 10)
        ]
        made.append(PrefixSession(rng.uniform(0.0, span_s), _THINK_S[kind], turns))
    return made


class ServedBySteps(Protocol):
    """A scheduler with its prefix cache, which forms steps from submitted requests."""

    def submit(self, request: PrefixRequest, at_s: float) -> None: ...

    def form(self, at_s: float) -> list[Chunk]:
        """The chunks of the next step; empty if there is nothing to do."""
        ...

    def done(self, at_s: float) -> Iterable[PrefixRequest]:
        """End the step. Returns the requests that got a token."""
        ...

    @property
    def hit_fraction(self) -> float:
        """Fraction of the prompt tokens of started requests that were found in the cache."""
        ...


class ServedByBallast:
    def __init__(self, block_count: int, *, caching: bool) -> None:
        limits = WorkerLimits(
            block_tokens=BLOCK_TOKENS,
            max_model_len=LONGEST,
            vocab_size=VOCABULARY,
            max_running_count=PLACES,
            max_batch_tokens=STEP_TOKENS,
            max_waiting_count=1000,
            max_waiting_tokens=1 << 30,
            prefix_caching=caching,
        )
        self._core = WorkerCore(limits, block_count)
        self._core.handle(StreamOpened(0.0, 1))
        self._requests: dict[int, PrefixRequest] = {}
        self._numbers: dict[int, int] = {}  # sequence -> request
        self._step: Execute | None = None

    def submit(self, request: PrefixRequest, at_s: float) -> None:
        self._requests[request.number] = request
        sampling = SamplingParams(max_tokens=len(request.answer), temperature=1.0, seed=request.number, ignore_eos=True)
        self._core.handle(
            Submitted(
                at_s=at_s,
                key=SequenceKey(1, request.number),
                request_id=RequestId(str(request.number)),
                attempt=1,
                prompt_token_ids=request.prompt,
                sampling=sampling,
                wants_text=False,
            )
        )

    def form(self, at_s: float) -> list[Chunk]:
        commands = self._core.handle(BatchWanted(at_s))
        self._step = next((command for command in commands if isinstance(command, Execute)), None)
        if self._step is None:
            return []
        for added in self._step.batch.added:
            self._numbers[added.sequence_id] = cast(int, added.sampling.seed)
        return [Chunk(part.first_position, len(part.token_ids)) for part in self._step.batch.slices]

    def done(self, at_s: float) -> Iterable[PrefixRequest]:
        assert self._step is not None
        batch = self._step.batch
        told = [self._requests[self._numbers[part.sequence_id]] for part in batch.slices if part.samples]
        token_ids = tuple(request.answer[request.token_count] for request in told)
        result = StepResult(batch.step_id, token_ids, (None,) * len(told), 0.01)
        self._core.handle(StepDone(at_s, result, ("",) * len(told)))
        return told

    @property
    def counts(self) -> tuple[int, int]:
        """(prompt tokens found in the cache, all prompt tokens) of started requests."""
        index = self._core.group_scheduler.scheduler.prefixes
        return index.hit_tokens_total, index.queried_tokens_total

    @property
    def hit_fraction(self) -> float:
        found, asked = self.counts
        return found / max(1, asked)


class ServedByVllm:
    """vLLM's scheduler and cache manager."""

    def __init__(self, model_dir: Path, block_count: int) -> None:
        # vLLM is untyped here, because the project does not depend on it.
        config, interface = _module("vllm.config"), _module("vllm.v1.kv_cache_interface")
        utils, self._request = _module("vllm.v1.core.kv_cache_utils"), _module("vllm.v1.request")
        self._sampling, self._outputs = _module("vllm.sampling_params"), _module("vllm.v1.outputs")
        hashes = _module("vllm.utils.hashing").sha256
        cache = config.CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
        cache.num_gpu_blocks = block_count + 1  # vLLM never allocates block 0 to a request
        whole = config.VllmConfig(
            model_config=config.ModelConfig(
                model=str(model_dir), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST
            ),
            scheduler_config=config.SchedulerConfig(
                max_num_seqs=PLACES,
                max_num_batched_tokens=STEP_TOKENS,
                max_model_len=LONGEST,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=cache,
            device_config=config.DeviceConfig(device="cpu"),
        )
        spec = interface.FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=_module("torch").float32
        )
        blocks = interface.KVCacheConfig(
            num_blocks=block_count + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        )
        utils.init_none_hash(hashes)
        self._hasher = utils.get_request_block_hasher(BLOCK_TOKENS, hashes)
        self._scheduler = _module("vllm.v1.core.sched.scheduler").Scheduler(
            vllm_config=whole,
            kv_cache_config=blocks,
            structured_output_manager=_module("vllm.v1.structured_output").StructuredOutputManager(whole),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self._requests: dict[str, PrefixRequest] = {}
        self._planned: Any = None
        self._queries = self._hits = 0

    def submit(self, request: PrefixRequest, at_s: float) -> None:
        self._requests[str(request.number)] = request
        sampling = self._sampling.SamplingParams(max_tokens=len(request.answer), ignore_eos=True)
        self._scheduler.add_request(
            self._request.Request(
                request_id=str(request.number),
                prompt_token_ids=list(request.prompt),
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=at_s,
                block_hasher=self._hasher,
            )
        )

    def form(self, at_s: float) -> list[Chunk]:
        self._planned = plan = self._scheduler.schedule()
        counts = plan.num_scheduled_tokens
        first = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        again = plan.scheduled_cached_reqs
        first |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        return [Chunk(first[name], count) for name, count in counts.items()]

    def done(self, at_s: float) -> Iterable[PrefixRequest]:
        plan, live = self._planned, self._scheduler.requests
        names = list(plan.num_scheduled_tokens)
        whole = [live[name].num_computed_tokens >= live[name].num_tokens for name in names]
        told = [self._requests[name] for name, samples in zip(names, whole, strict=True) if samples]
        tokens = [
            [self._requests[name].answer[self._requests[name].token_count]] if samples else []
            for name, samples in zip(names, whole, strict=True)
        ]
        indices = {name: index for index, name in enumerate(names)}
        said = self._scheduler.update_from_output(plan, self._outputs.ModelRunnerOutput(names, indices, tokens))
        for outputs in said.values():
            if (stats := outputs.scheduler_stats) is not None:
                self._queries += stats.prefix_cache_stats.queries
                self._hits += stats.prefix_cache_stats.hits
        return told

    @property
    def hit_fraction(self) -> float:
        return self._hits / max(1, self._queries)


def _module(name: str) -> Any:
    import importlib

    return importlib.import_module(name)


@dataclass
class PrefixServing:
    hit_fraction: float
    prompt_tokens: int = 0
    computed_tokens: int = 0
    ended_s: float = 0.0
    ttfts_s: list[float] = field(default_factory=list[float])


def serve(server: ServedBySteps, sessions: Sequence[PrefixSession], cost: CostModel) -> PrefixServing:
    """Serve all sessions in virtual time. A turn arrives `think_s` after the previous answer of its session."""
    numbers, found, now_s = itertools.count(1), PrefixServing(0.0), 0.0
    due: list[tuple[float, int, int, tuple[int, ...]]] = [
        (session.begin_s, index, 0, ()) for index, session in enumerate(sessions)
    ]  # (arrival, session, turn, tokens before the turn)
    heapq.heapify(due)
    open_: dict[int, tuple[int, int]] = {}  # request -> (session, turn)
    while due or open_:
        while due and due[0][0] <= now_s:
            at_s, index, turn, before = heapq.heappop(due)
            new, answer = sessions[index].turns[turn]
            request = PrefixRequest(next(numbers), (*before, *new), answer, at_s)
            found.prompt_tokens += len(request.prompt)
            open_[request.number] = index, turn
            server.submit(request, now_s)
        if not (chunks := server.form(now_s)):
            now_s = max(now_s, due[0][0])
            continue
        found.computed_tokens += sum(chunk.token_count for chunk in chunks)
        now_s += cost.batch_cost_s(chunks)
        for request in server.done(now_s):
            request.token_count += 1
            if request.token_count == 1:
                found.ttfts_s.append(now_s - request.asked_s)
            if request.token_count == len(request.answer):
                index, turn = open_.pop(request.number)
                session = sessions[index]
                if turn + 1 < len(session.turns):
                    heapq.heappush(due, (now_s + session.think_s, index, turn + 1, (*request.prompt, *request.answer)))
    found.hit_fraction, found.ended_s = server.hit_fraction, now_s
    return found


def row(name: str, block_count: int, found: PrefixServing) -> str:
    p50, p99 = (quantile(found.ttfts_s, fraction) * 1e3 for fraction in (0.5, 0.99))
    computed = f"{found.computed_tokens:,} | {p50:,.0f} | {p99:,.0f} | {found.ended_s:,.1f}"
    return f"| {block_count:,} | {name} | {len(found.ttfts_s)} | {found.hit_fraction:.2%} | {computed} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2000, 4000, 8000], help="KV blocks of 16 tokens")
    parser.add_argument("--span-s", type=float, default=180.0, help="in which sessions begin (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=[40, 300], help="of a turn: minimum and maximum")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE}")
    args = parser.parse_args()
    machine = catalogue_machine(CLUSTER.removeprefix("1x"), MODEL, VOCABULARY)
    cost = machine.execution.cost_of(machine.model.layer_count, is_first=True, is_last=True)
    sessions = sessions_of(args.span_s, tuple(args.new_tokens), args.seed)
    try:
        version = f"vLLM {_module('vllm').__version__}"
    except ImportError:
        version = ""
        print("vllm cannot be imported: ours alone", file=sys.stderr)
    rows = ["| blocks | | requests | hits | tokens computed | P50 TTFT ms | P99 | ended after s |", f"|{'---|' * 8}"]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_tiny("llama", Path(folder) / "tiny", layers=1, max_len=2 * LONGEST)
        for block_count in args.blocks:
            servers: dict[str, ServedBySteps] = {
                "no cache": ServedByBallast(block_count, caching=False),
                "Ballast": ServedByBallast(block_count, caching=True),
            }
            if version:
                servers[version] = ServedByVllm(model_dir, block_count)
            for name, server in servers.items():
                rows.append(row(name, block_count, serve(server, sessions, cost)))
                print(rows[-1], flush=True)
    if args.write:
        shared = "" if args.new_tokens[1] < 500 else "-long"
        quote_run(PAGE, f"prefix-beside{shared}", "\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
