"""Recomputes recorded answers with `transformers` on the CPU and counts differing tokens.

    python -m benchmarks.verify_answers --results out/demo/results.json --model out/demo/model --count 24

The reference reads prompt and answer at once, in float64, and must choose each served token itself at its position; by
induction it would produce the same answer. Answers computed in float32 may differ where rounding decides: a difference
is excused as a near-tie if the served token's logit is within twice the largest change of the reference's own logits in
float32, as both may have been rounded. This runs in a separate process, so that the cluster's engine is not loaded.

Prints one line of JSON. Exit status: 0 all tokens equal, 1 some differ or too few answers, 2 bad input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ballast.common.errors import ConfigError
from tools.bench.records import RequestOutcome
from tools.bench.results import RequestResult, read_result


@dataclass(frozen=True, slots=True)
class Verification:
    answers: int
    tokens: int
    differing_tokens: int
    near_ties: int


def load_reference(model_dir: Path, dtype: str = "float32") -> PreTrainedModel:
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.eval()


def choose(requests: Sequence[RequestResult], count: int, also: Sequence[int] = ()) -> list[RequestResult]:
    """`count` finished requests with recorded tokens, evenly spaced over the trace, including the first and last; and
    those with indices in `also`.
    """
    usable = [r for r in requests if r.outcome is RequestOutcome.FINISHED and r.prompt_token_ids and r.output_token_ids]
    if len(usable) <= count:
        return usable
    spread = {i * (len(usable) - 1) // max(count - 1, 1) for i in range(count)}
    return [r for i, r in enumerate(usable) if i in spread or r.index in also]


class AnswerReference:
    """A checkpoint executed by `transformers`. `dtype`: that of the verified answers."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        self._exact = load_reference(model_dir, "float64")
        self._rounded = None if dtype == "float64" else load_reference(model_dir, dtype)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(exact_TV, noise_T): float64 logits at every token of the answer, and the maximum by which rounding may
        change the difference between two of them.
        """
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        exact_TV = self._exact(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        if self._rounded is None:
            return exact_TV, torch.zeros(len(exact_TV), dtype=torch.float64)
        rounded_TV = self._rounded(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        return exact_TV, 2 * (rounded_TV.double() - exact_TV).abs().amax(dim=-1)


def compare(exact_TV: torch.Tensor, noise_T: torch.Tensor, answer: Sequence[int]) -> tuple[int, int]:
    """(tokens of `answer` that differ from the reference's choice, further ones that are excused as near-ties)."""
    served_T = torch.tensor(answer)
    gap_T = exact_TV.amax(dim=-1) - exact_TV.gather(1, served_T[:, None])[:, 0]
    differs_T = exact_TV.argmax(dim=-1) != served_T
    near_T = differs_T & (gap_T <= noise_T)
    return int((differs_T & ~near_T).sum()), int(near_T.sum())


def verify(reference: AnswerReference, requests: Sequence[RequestResult]) -> Verification:
    differing, near_ties, tokens = 0, 0, 0
    for request in track(requests, "transformers", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        answer = request.output_token_ids or []
        found, excused = compare(*reference.logits(request.prompt_token_ids or [], answer), answer)
        differing, near_ties, tokens = differing + found, near_ties + excused, tokens + len(answer)
    return Verification(len(requests), tokens, differing, near_ties)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Recompute recorded answers with transformers.")
    parser.add_argument("--results", type=Path, required=True, help="results file of a run with --record-tokens")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--policy", help="policy whose answers are verified (default: the only one)")
    parser.add_argument("--count", type=int, default=24, help="answers to verify, spread over the trace")
    parser.add_argument("--also", type=int, nargs="+", default=[], metavar="INDEX", help="verify these answers, too")
    parser.add_argument("--at-least", type=int, default=1, help="fail if fewer answers can be verified")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of the served answers")
    args = parser.parse_args(arguments)
    try:
        policies = read_result(args.results).policies
        name = args.policy or next(iter(policies))
        if name not in policies:
            raise ConfigError(str(args.results), f"has no policy {name!r}, only {', '.join(policies)}")
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        return 2
    chosen = choose(policies[name].requests, args.count, args.also)
    found = verify(AnswerReference(args.model, args.dtype), chosen)
    print(json.dumps(asdict(found)))
    return 0 if found.differing_tokens == 0 and found.answers >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
