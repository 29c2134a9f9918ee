"""The service level objective (SLO): limits on latencies, and the share of requests that must meet them."""

from dataclasses import dataclass

from ballast.common.errors import ConfigError
from ballast.common.units import duration
from tools.bench.records import RequestOutcome
from tools.bench.results import PolicyResult, RequestResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    ttft_s: float
    tpot_s: float | None = None  # limit on a request's mean time per token; None: unlimited
    share: float = 0.99  # share of all requests that must meet both

    def __post_init__(self) -> None:
        for name, value in (("--slo-ttft-s", self.ttft_s), ("--slo-tpot-s", self.tpot_s)):
            if value is not None and not value > 0.0:
                raise ConfigError(name, f"must be above 0, got {value:g}")
        if not 0.0 < self.share <= 1.0:
            raise ConfigError("--slo-share", f"must be above 0 and at most 1, got {self.share:g}")

    def met_by(self, request: RequestResult) -> bool:
        """Whether a request meets the limits. A request that is still running at the end of the measurement is judged
        on its tokens so far.
        """
        if request.outcome not in (RequestOutcome.FINISHED, RequestOutcome.CANCELLED) or request.first_token_s is None:
            return False
        slow = self.tpot_s is not None and request.tpot_s is not None and request.tpot_s > self.tpot_s
        return not slow and request.first_token_s - request.planned_s <= self.ttft_s

    def met_share(self, policy: PolicyResult) -> float:
        """Share of a policy's requests that meet the limits; 1 if there are none."""
        return sum(map(self.met_by, policy.requests)) / len(policy.requests) if policy.requests else 1.0

    def __str__(self) -> str:
        tokens = "" if self.tpot_s is None else f" and each further one within {duration(self.tpot_s)}"
        return f"{100 * self.share:.4g} % of the requests get their first token within {duration(self.ttft_s)}{tokens}"


LENIENT = Slo(ttft_s=2.0, share=0.9)  # default
