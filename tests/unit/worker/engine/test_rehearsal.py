"""The rehearsal steps that a GPU runs before it serves, tested on the CPU: which steps they are, and how their memory
is accounted for.
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import NewSequence
from services.worker.engine import implementation, rehearsal
from services.worker.engine.implementation import BallastModel
from services.worker.engine.load import beside
from services.worker.engine.model_config import read_model_config
from services.worker.engine.packing import PackedStep
from services.worker.engine.rehearsal import Largest, fitting_budget
from services.worker.engine.sampler import Sampler, SampleRow
from services.worker.memory.host import HostBackend

LONGEST, LARGEST = 64, Largest(tokens=150, sequences=9)
BESIDE_BYTES = 7 << 20


class Meter:
    total_bytes = 100 << 20

    def __init__(self) -> None:
        self._free = iter([50 << 20, (50 << 20) - BESIDE_BYTES])

    def free_bytes(self) -> int:
        return next(self._free)


class Recorded:
    """An attention backend that records the steps it prepares."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.steps: list[PackedStep] = []

    def prepare(self, step: PackedStep) -> Any:
        self.steps.append(step)
        return self._inner.prepare(step)


def served_of(model_dir: Path) -> BallastModel:
    config = read_model_config(model_dir)
    return BallastModel(
        model_dir=model_dir,
        config=config,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        device="cpu",
        kernels=None,
        peers=None,
        attention_backend="auto",
        whole=config,
    )


def test_the_largest_steps_of_both_kinds_are_run_and_their_memory_reported(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Recorded] = []
    inner = implementation.own_attention

    def attention(*given: Any) -> Recorded:
        recorded.append(Recorded(inner(*given)))
        return recorded[-1]

    monkeypatch.setattr(implementation, "own_attention", attention)
    told = beside(HostBackend(), Meter(), served_of(model_dir), 16, LONGEST, LARGEST)
    assert told == BESIDE_BYTES
    chunks, decodes, one = recorded[0].steps  # the largest step of each variant of the kernel, and a draw
    assert (chunks.row_count, chunks.decode_count, len(chunks.chunks)) == (150, 0, 3)
    assert (decodes.row_count, decodes.decode_count, one.row_count) == (9, 9, 1)
    assert set(decodes.decode_contexts_S) == {LONGEST}  # the longest contexts, which are split


def test_parameters_and_kv_get_the_share_less_the_largest_steps() -> None:
    assert fitting_budget(Meter(), 0.9, BESIDE_BYTES) == (90 << 20) - BESIDE_BYTES


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that exist at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.most_bytes = max(self.most_bytes, sum(self._sizes.values()))
        return out


def sampling_bytes(sampling: SamplingParams) -> int:
    """Peak bytes while 32 rows are sampled at once."""
    sampler = Sampler(5000, [2], torch.device("cpu"))
    for row in range(32):
        sampler.add(NewSequence(row, (1,) * 50, (), sampling))
    logits_RV = torch.randn(32, 5000)
    with torch.inference_mode(), Held() as held:
        sampler.sample([SampleRow(row, 50) for row in range(32)], logits_RV)
    return held.most_bytes


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, logprobs=20),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.05, seed=1, logprobs=20),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={5: 1.0}, seed=2),
    ],
)
def test_no_request_needs_more_memory_than_the_largest_steps(sampling: SamplingParams) -> None:
    row_bytes = 5000 * 4
    assert sampling_bytes(sampling) <= sampling_bytes(rehearsal._SAMPLING) + row_bytes
