"""LoRA adapters: each generates the tokens of its merged dense model, also with several adapters in one batch."""

import contextlib
import random
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from ballast.common.sampling import SamplingParams
from ballast.service.tokenizer import load_tokenizer
from services.worker.engine.load import Engine, load_engine
from services.worker.ranks.channel import RankLog
from services.worker.ranks.load import load_ranked
from tests.golden.conftest import CheckpointMaker
from tests.support.adapters import merged, write_adapter
from tests.support.engine import GREEDY, Job, generate
from tests.support.engine_loop import EngineLoop
from tests.support.families import write_family

pytestmark = [pytest.mark.golden]

PROMPTS = [tuple(random.Random(i).randrange(5, 380) for _ in range(5 + 7 * i)) for i in range(6)]
LOGPROBS = replace(GREEDY, logprobs=2)
EXACT = 1e-9  # tolerance in float64


@contextlib.contextmanager
def load(
    folder: Path, dtype: str, adapters: dict[str, Path] | None = None, model_impl: str = "auto", ranks: int = 1
) -> Generator[Engine]:
    load_one = partial(
        load_engine,
        folder,
        dtype=dtype,
        device_memory_bytes=16 << 20,
        max_model_len=128,
        lora_modules=adapters,
        model_impl=model_impl,
        kernels="auto" if adapters else "torch",
    )
    if ranks == 1:
        with load_one(device="cpu") as engine:
            yield engine
        return
    ranked = load_ranked(load_one, ["cpu"] * ranks, RankLog())
    try:
        with ranked.engine:
            yield ranked.engine
    finally:
        ranked.crew.close()


def jobs_of(names: Sequence[str], output_count: int = 12) -> list[Job]:
    return [
        Job(i, prompt, output_count, replace(LOGPROBS, adapter=names[i % len(names)]))
        for i, prompt in enumerate(PROMPTS * len(names))
    ]


def check(model_dir: Path, tmp_path: Path, dtype: str, model_impl: str = "auto", ranks: int = 1) -> None:
    adapters = {
        "all": write_adapter(tmp_path / "all", model_dir, rank=3, alpha=7, seed=1),
        "attention": write_adapter(
            tmp_path / "attention", model_dir, rank=8, alpha=4, targets=("q_proj", "v_proj", "o_proj"), seed=2
        ),
        "some": write_adapter(
            tmp_path / "some", model_dir, rank=16, targets=("down_proj", "up_proj"), seed=3, layers=[1], use_rslora=True
        ),
    }
    names = ("", *adapters)
    jobs = jobs_of(names)
    with load(model_dir, dtype, adapters, model_impl, ranks) as engine:
        assert [one.name for one in engine.info.adapters] == sorted(adapters)
        generate(engine, jobs, at_once=9, chunk_tokens=11)
    outputs = {name: [job for job in jobs if job.sampling.adapter == name] for name in names}
    for name in names:
        dense = model_dir if not name else merged(tmp_path / f"dense-{name}", model_dir, adapters[name])
        wanted = [Job(job.sequence_id, job.prompt, job.count, LOGPROBS) for job in outputs[name]]
        with load(dense, dtype, model_impl=model_impl) as engine:
            generate(engine, wanted, at_once=9, chunk_tokens=11)
        tolerance = EXACT if dtype == "float64" else 1e-3
        for job, want in zip(outputs[name], wanted, strict=True):
            assert job.chosen == want.chosen, name
            for one, other in zip(job.logprobs, want.logprobs, strict=True):
                assert one is not None
                assert other is not None
                assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
    own = [job.chosen for job in outputs[""]]
    assert all([job.chosen for job in outputs[name]] != own for name in adapters), "the adapter changes the output"


@pytest.mark.parametrize(("arch", "dtype"), [("llama", "float64"), ("qwen2", "float32"), ("qwen3", "float64")])
def test_tokens_are_those_of_the_merged_model(
    arch: str, dtype: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    check(checkpoint(arch, False), tmp_path, dtype)


def test_ranks_shard_the_adapters(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    check(checkpoint("qwen2", False), tmp_path, "float64", ranks=2)


def test_adapters_on_a_transformers_model(tmp_path: Path) -> None:
    folder = write_family("gemma2", tmp_path / "family")
    check(folder, tmp_path, "float64", "transformers")
    with (
        pytest.raises(ConfigError, match="lora_modules: transformers computes this model"),
        load(folder, "float64", {"all": tmp_path / "all"}, ranks=2),
    ):
        pass


def test_equal_prompts_of_different_adapters_share_no_kv(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    model_dir = checkpoint("llama", False)
    adapter = write_adapter(tmp_path / "one", model_dir)
    prompt = tuple(range(5, 85))
    with load(model_dir, "float64", {"one": adapter}) as engine:
        found: dict[bool, list[tuple[int, ...]]] = {}
        for caching in (False, True):
            loop = EngineLoop(engine, load_tokenizer(model_dir), prefix_caching=caching)
            for name in ("", "one", "one", ""):
                answer = loop.submit(prompt, SamplingParams(temperature=0.0, max_tokens=8, adapter=name))
                loop.run(lambda: False)
                found.setdefault(caching, []).append(tuple(answer.token_ids))
            loop.finish()
            assert loop.core.group_scheduler.scheduler.prefixes.hit_tokens_total == (128 if caching else 0)
    assert found[True] == found[False]
    assert found[True][0] == found[True][3] != found[True][1] == found[True][2]
