"""Lengths of prompts and answers, for traces without suitable ones.

Lengths are drawn, with replacement, from the requests of a file (prompt and answer together), or from a distribution
fitted to a data set of which only statistics are published. `Lengths.source` states which in every result.

| name      | published                                            | fit |
|-----------|------------------------------------------------------|-----|
| burstgpt  | mean, P50, P80, P95, P99 (KunServe, first arXiv version, table 2) | piecewise linear in the logarithm |
| azureconv | likewise                                             | likewise |
| agieval   | likewise                                             | likewise |
| sharegpt  | means 1660 and 373, prompts of at most 4096 (KunServe, EuroSys '26, section 5.1) | log-normal |
| longbench | means 5900 and 499 (likewise)                        | log-normal |
| longanswers | mean of prompts as in BurstGPT; that of answers, 1,000, is our choice | log-normal |

A log-normal fit has the published mean (after truncating prompts to the maximum) and an assumed spread.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ballast.common.errors import ConfigError
from tools.bench.generate import BURSTGPT_INPUT, BURSTGPT_OUTPUT, Quantiles, sample_length
from tools.bench.traces import Trace, TraceRequest, read_trace

_AZURECONV_INPUT: Quantiles = ((0.0, 30), (0.5, 998), (0.8, 1159), (0.95, 4080), (0.99, 4096), (1.0, 4100))
_AZURECONV_OUTPUT: Quantiles = ((0.0, 83), (0.5, 202), (0.8, 411), (0.95, 451), (0.99, 585), (1.0, 700))
_AGIEVAL_INPUT: Quantiles = ((0.0, 20), (0.5, 128), (0.8, 556), (0.95, 619), (0.99, 651), (1.0, 700))
_AGIEVAL_OUTPUT: Quantiles = ((0.0, 275), (0.5, 363), (0.8, 450), (0.95, 578), (0.99, 698), (1.0, 900))
_ASSUMED_SIGMA = 0.7  # standard deviation of the logarithm, if only means are published

Draw = Callable[[random.Random], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Lengths:
    name: str
    source: str  # stated in the result
    draw: Draw


def lengths_of(name: str) -> Lengths:
    """The lengths of the fitted data set `name`, or of the requests in the trace file `name`.

    Raises:
        ConfigError: there is neither such a data set nor such a file.
    """
    if name in _FITTED:
        source, draw = _FITTED[name]
        return Lengths(name, source, draw)
    path = Path(name)
    if not path.exists():
        raise ConfigError("workloads", f"{name!r} is no file, and no data set: there are {', '.join(_FITTED)}")
    pool = read_trace(path).requests

    def draw_row(rng: random.Random) -> tuple[int, int]:
        row = rng.choice(pool)
        return row.input_tokens, row.output_tokens

    return Lengths(path.stem, f"drawn from {path.name}", draw_row)


def with_lengths(trace: Trace, lengths: Lengths, seed: int) -> Trace:
    rng = random.Random(seed)
    requests = tuple(TraceRequest(r.arrival_s, *lengths.draw(rng)) for r in trace.requests)
    return replace(trace, requests=requests, lengths=lengths.source)


def _by_quantiles(input_quantiles: Quantiles, output_quantiles: Quantiles) -> Draw:
    return lambda rng: (sample_length(input_quantiles, rng.random()), sample_length(output_quantiles, rng.random()))


def _by_means(input_mean: float, output_mean: float, max_input: int | None = None) -> Draw:
    def one(rng: random.Random, mean: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - _ASSUMED_SIGMA**2 / 2, _ASSUMED_SIGMA)))

    def draw(rng: random.Random) -> tuple[int, int]:
        input_tokens, output_tokens = one(rng, input_mean), one(rng, output_mean)
        return min(input_tokens, max_input or input_tokens), output_tokens

    return draw


def _long_answer(rng: random.Random) -> tuple[int, int]:
    def one(mean: float, sigma: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))

    return one(642, 0.79), one(1000, 1.02)


_QUANTILES = "fitted to published quantiles (KunServe, first arXiv version, table 2)"
_MEANS = f"log-normal with the published means (KunServe, EuroSys '26, section 5.1), assumed spread {_ASSUMED_SIGMA:g}"
_FITTED: dict[str, tuple[str, Draw]] = {
    "burstgpt": (f"BurstGPT, {_QUANTILES}", _by_quantiles(BURSTGPT_INPUT, BURSTGPT_OUTPUT)),
    "azureconv": (f"AzureConv, {_QUANTILES}", _by_quantiles(_AZURECONV_INPUT, _AZURECONV_OUTPUT)),
    "agieval": (f"AGIEval-CoT, {_QUANTILES}", _by_quantiles(_AGIEVAL_INPUT, _AGIEVAL_OUTPUT)),
    "sharegpt": (f"ShareGPT, {_MEANS}", _by_means(1790, 373, 4096)),
    "longbench": (f"LongBench, {_MEANS}", _by_means(5900, 499)),
    "longanswers": ("log-normal, prompts of 642 tokens on average as BurstGPT's, answers of 1,000", _long_answer),
}
