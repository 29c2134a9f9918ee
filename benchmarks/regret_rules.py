"""What is asked of a policy that nobody has to choose: of the runs of one cell, and of all cells.

A cell is judged by draw 0, or, where the best rival's P99 TTFT exceeds 10 s (saturated), by the medians over its draws.
Waits below a cell's target (1 s, or five times the median of a calm run) count as equal. Rivals are all policies that
are given except the one that is judged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

OURS = "drop"
PLAIN = "recompute"
TARGET_S, CALM_FACTOR = 1.0, 5.0
SATURATED_S = 10.0
MOST_TTFT, MOST_TTFT_SATURATED = 1.10, 1.25
MOST_TPOT_PLAIN, MOST_TPOT_BEST = 1.10, 1.25
LEAST_THROUGHPUT = 0.97
COMPUTING_SHARE = 0.70
BRIM, MOST_AT_THE_BRIM = (0.95, 1.15), 1.05  # peak demand with recompute, in parts of the memory
GAIN, GREAT_GAIN = 0.8, 0.5
GOOD_S = 0.5  # shorter waits are not told apart by predictions
_FIGURES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tokens_per_s", "preemptions", "mean_demand", "peak_demand")


@dataclass(frozen=True, slots=True)
class Judged:
    """One policy in one cell: what it did, medians over `draws`."""

    policy: str
    draws: int
    broken: int  # draws that ended with a broken invariant
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tokens_per_s: float
    preemptions: float
    mean_demand: float
    peak_demand: float


@dataclass(frozen=True, slots=True)
class Row:
    """One cell and all policies that have been run in it."""

    cell: str
    target_s: float
    saturated: bool
    prompt_share: float
    policies: Mapping[str, Judged]

    @property
    def memory_is_short(self) -> bool:
        plain = self.policies.get(PLAIN)
        if plain is None:
            return False
        return self.prompt_share < COMPUTING_SHARE and (plain.preemptions > 0 or plain.peak_demand > 1.0)

    @property
    def is_at_the_brim(self) -> bool:
        """With recompute memory is just full, or nearly."""
        plain = self.policies.get(PLAIN)
        return plain is not None and BRIM[0] <= plain.peak_demand <= BRIM[1]

    def over_plain(self, policy: str) -> dict[str, float]:
        """Each figure in parts of recompute's, as it is."""
        ours, plain = self.policies[policy], self.policies[PLAIN]
        return {
            "P50 TTFT": ours.ttft_p50_s / plain.ttft_p50_s,
            "P99 TTFT": ours.ttft_p99_s / plain.ttft_p99_s,
            "P50 TPOT": ours.tpot_p50_s / plain.tpot_p50_s,
        }

    @property
    def most_ttft(self) -> float:
        return MOST_TTFT_SATURATED if self.saturated else MOST_TTFT

    def rivals(self, policy: str) -> list[Judged]:
        return [judged for name, judged in self.policies.items() if name != policy]

    def best(self, policy: str) -> Judged:
        """The rival with the least P99 TTFT."""
        return min(self.rivals(policy), key=lambda judged: judged.ttft_p99_s)

    def ttft_regret(self, policy: str, against: str | None = None) -> float:
        """P99 TTFT against the best of all, or against one other; waits below the target are equal."""
        theirs = (self.best(policy) if against is None else self.policies[against]).ttft_p99_s
        return max(self.policies[policy].ttft_p99_s, self.target_s) / max(theirs, self.target_s)

    def gain(self, policy: str) -> float:
        """P99 TTFT in parts of the best rival's, as it is."""
        return self.policies[policy].ttft_p99_s / self.best(policy).ttft_p99_s

    def tpot_regret(self, policy: str) -> float:
        """P50 TPOT against the policy with the best P99 TTFT, itself included."""
        ours, best = self.policies[policy], self.best(policy)
        return ours.tpot_p50_s / best.tpot_p50_s if best.ttft_p99_s < ours.ttft_p99_s else 1.0

    def tpot_over_plain(self, policy: str) -> float | None:
        """P50 TPOT against recompute's where that meets its target; None elsewhere."""
        plain = self.policies.get(PLAIN)
        if plain is None or plain.ttft_p99_s > self.target_s:
            return None
        return self.policies[policy].tpot_p50_s / plain.tpot_p50_s

    def throughput(self, policy: str) -> float:
        """Tokens until the last arrival in parts of the best rival's."""
        best = max(judged.tokens_per_s for judged in self.rivals(policy))
        return self.policies[policy].tokens_per_s / best if best else 1.0

    def faults(self, policy: str) -> list[str]:
        """What the policy misses here, in words."""
        found: list[str] = []
        if (regret := self.ttft_regret(policy)) > self.most_ttft:
            found.append(f"P99 TTFT {regret:.2f} x")
        if (regret := self.tpot_regret(policy)) > MOST_TPOT_BEST:
            found.append(f"TPOT {regret:.2f} x")
        if (over := self.tpot_over_plain(policy)) is not None and over > MOST_TPOT_PLAIN:
            found.append(f"TPOT {over:.2f} x recompute's")
        if (share := self.throughput(policy)) < LEAST_THROUGHPUT:
            found.append(f"throughput {share:.2f} x")
        if self.policies[policy].broken:
            found.append(f"{self.policies[policy].broken} broken")
        return found


def row_of(cell: str, runs: Sequence[Mapping[str, Any]], calm: Mapping[str, Any] | None) -> Row | None:
    """What the runs of a cell say; None where fewer than two policies have figures."""
    first = [run for run in runs if run["draw"] == 0 and run["failed"] is None]
    names = list(dict.fromkeys(run["policy"] for run in runs))
    saturated = is_saturated(first)
    policies = {name: judged for name in names if (judged := _judged(name, runs, saturated=saturated)) is not None}
    if len(policies) < 2:
        return None
    calm_s = calm["ttft_p50_s"] if calm is not None and calm["failed"] is None else None
    target_s = max(TARGET_S, CALM_FACTOR * calm_s) if calm_s is not None else TARGET_S
    return Row(cell, target_s, saturated, max(run["prompt_share"] for run in runs), policies)


def is_saturated(first: Sequence[Mapping[str, Any]]) -> bool:
    """Whether draw 0 says so; by the rivals of ours."""
    theirs = [run["ttft_p99_s"] for run in first if not is_ours(run["policy"]) and run["failed"] is None]
    return bool(theirs) and min(theirs) > SATURATED_S


def is_ours(policy: str) -> bool:
    return policy.split(":")[0] == OURS


def _judged(name: str, runs: Sequence[Mapping[str, Any]], *, saturated: bool) -> Judged | None:
    mine = [run for run in runs if run["policy"] == name and (saturated or run["draw"] == 0)]
    good = [run for run in mine if run["failed"] is None and run["ttft_p99_s"] is not None]
    if not good:
        return None
    figures = {figure: median(run[figure] for run in good) for figure in _FIGURES}
    return Judged(name, len(good), len(mine) - len(good), **figures)


# ---------------------------------------------------------------- as text


def table(rows: Sequence[Row], policies: Sequence[str], ours: str) -> str:
    """Markdown: P50/P99 TTFT in seconds, P50 TPOT in ms, tokens/s until the last arrival; then what ours misses."""
    lines = [
        f"| cell (prompts' share, demand) | {' | '.join(policies)} | P99 TTFT of {ours} over the best (as it is) |"
        " TPOT | tokens/s | misses |",
        f"|---|{'---|' * len(policies)}---|---|---|---|",
    ]
    for row in rows:
        plain = row.policies.get(PLAIN)
        demand = "" if plain is None else f", {plain.mean_demand:.0%}/{plain.peak_demand:.0%}"
        mark = " **memory**" if row.memory_is_short else ""
        cells = [f"{row.cell} ({row.prompt_share:.0%}{demand}){mark}"]
        cells += [_told(row.policies.get(name)) for name in policies]
        if ours in row.policies:
            cells += [f"{row.ttft_regret(ours):.2f} ({row.gain(ours):.2f})", f"{row.tpot_regret(ours):.2f}"]
            cells += [f"{row.throughput(ours):.2f}", "; ".join(row.faults(ours)) or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _told(judged: Judged | None) -> str:
    if judged is None:
        return "-"
    draws = f" [{judged.draws}]" if judged.draws > 1 else ""
    waits = f"{judged.ttft_p50_s:.2f}/{judged.ttft_p99_s:.2f}"
    return f"{waits}, {1e3 * judged.tpot_p50_s:.0f}, {judged.tokens_per_s:.0f}{draws}"


def summary(rows: Sequence[Row], policies: Sequence[str], ours: str) -> list[str]:
    """One line for each rule, then each policy's own worst."""
    mine = [row for row in rows if ours in row.policies]
    if not mine:
        return [f"{ours} has not been run"]
    lines = [
        _rule("P99 TTFT at most 1.10 x the best (saturated: 1.25)", mine, lambda r: r.ttft_regret(ours) <= r.most_ttft),
        _rule(
            "P50 TPOT at most 1.25 x that of the best P99 TTFT", mine, lambda r: r.tpot_regret(ours) <= MOST_TPOT_BEST
        ),
        _rule(
            "P50 TPOT at most 1.10 x recompute's where that meets its target",
            [row for row in mine if row.tpot_over_plain(ours) is not None],
            lambda r: (r.tpot_over_plain(ours) or 1.0) <= MOST_TPOT_PLAIN,
        ),
        _rule("tokens/s at least 0.97 x the best", mine, lambda r: r.throughput(ours) >= LEAST_THROUGHPUT),
    ]
    if brim := [row for row in mine if row.is_at_the_brim and ours != PLAIN]:
        worst = max(((ratio, what, r.cell) for r in brim for what, ratio in r.over_plain(ours).items()))
        lines.append(
            f"memory just full ({BRIM[0]:.0%} to {BRIM[1]:.0%}) in {len(brim)} cells: at most {worst[0]:.2f} x"
            f" recompute's (goal {MOST_AT_THE_BRIM}), {worst[1]} in {worst[2]}"
        )
    if short := [row for row in mine if row.memory_is_short]:
        gains = [row.gain(ours) for row in short]
        great = sum(gain <= GREAT_GAIN for gain in gains)
        lines.append(
            f"memory is short in {len(short)} cells: median of P99 TTFT over the best rival's {median(gains):.2f} (goal"
            f" {GAIN}), at most {GREAT_GAIN} in {great} (goal {math.ceil(len(short) / 3)})"
        )
        for name in policies:
            theirs = [r.policies[ours].ttft_p99_s / r.policies[name].ttft_p99_s for r in short if name in r.policies]
            if name != ours and theirs:
                great = sum(gain <= GREAT_GAIN for gain in theirs)
                lines.append(f"    over {name} alone: median {median(theirs):.2f}, at most {GREAT_GAIN} in {great}")
    lines.append(
        "worst over all cells (P99 TTFT over the best; P50 TPOT over that of the best; least share of tokens/s):"
    )
    for name in policies:
        have = [row for row in rows if name in row.policies]
        if have:
            worst = max(have, key=lambda row: row.ttft_regret(name))
            tpot, rate = max(r.tpot_regret(name) for r in have), min(r.throughput(name) for r in have)
            lines.append(f"    {name}: {worst.ttft_regret(name):.2f} ({worst.cell}); {tpot:.2f}; {rate:.2f}")
    return lines


def errors(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(predicted, was) of every decision: P99 TTFT, both at least as long as what counts as good."""
    return [
        (max(one["predicted_s"], GOOD_S), max(one["was_s"], GOOD_S))
        for run in runs
        for one in run.get("decisions", ())
        if one["was_s"] is not None
    ]


def told_errors(found: Sequence[tuple[float, float]]) -> str:
    if not found:
        return "no decision was predicted"
    factors = sorted(max(a / b, b / a) for a, b in found)
    within = sum(factor <= 3.0 for factor in factors) / len(factors)
    return (
        f"P99 TTFT as predicted beside what then happened, {len(found)} decisions: median error {median(factors):.2f} x"
        f" (goal 1.5), {within:.0%} within 3 x (goal 90 %)"
    )


def _rule(what: str, rows: Sequence[Row], kept: Callable[[Row], bool]) -> str:
    missed = [row.cell for row in rows if not kept(row)]
    where = f"; not in {', '.join(missed)}" if missed else ""
    return f"{what}: {len(rows) - len(missed)} of {len(rows)} cells{where}"
