"""What `docs/transitions.md` says, out of the tables: `make pages` writes it."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TypeVar

from ballast.common.transition import TransitionKind
from services.planner.core.stages import STAGES, CoordinatorRules, Stage
from services.worker.core.phases import PHASES

S = TypeVar("S", bound=StrEnum)

_HEAD = """# Transitions

Written by `make pages` from the tables in the code, which every step is held against and which have the numbers that
deadlines go by: `services/planner/core/stages.py` and `services/worker/core/phases.py`.

A drop merges instances into a pipeline, a restore takes it apart. The planner conducts both in two phases over the
members whose groups change; what has been decided is in its journal. A loss needs no transition: a worker that leaves a
group says so by closing its links, reads the layers that it lacks, and is placed again as what it then says it is.
"""


def page() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    yield "## The planner\n"
    yield from _diagram({stage: row.next for stage, row in STAGES.items()})
    yield "| stage | next | when | deadline: drop / restore | way out |"
    yield "|---|---|---|---|---|"
    rules = CoordinatorRules()
    for stage, row in STAGES.items():
        limits = " / ".join(f"{row.deadline_s(kind, rules):g} s" for kind in TransitionKind if kind in row.deadline)
        for i, (following, when) in enumerate(row.next.items()):
            tail = f"{limits} | {row.way_out}" if i == 0 else " | "
            yield f"| {stage if i == 0 else ''} | {following} | {when} | {tail} |"
        if not row.next:
            yield f"| {stage} | - | | - | {row.way_out} |"
    yield ""
    yield f"A member that a lost one was to send something to is not waited for longer than {rules.bereaved_s:g} s."
    yield ""
    yield "## A member\n"
    yield from _diagram({phase: row.next for phase, row in PHASES.items()})
    yield "| phase | in a drop | in a restore | deadline | way out |"
    yield "|---|---|---|---|---|"
    for phase, row in PHASES.items():
        limit = "-" if not row.next else "the planner's" if row.deadline_s is None else f"{row.deadline_s:g} s"
        yield f"| {phase} | {row.drop} | {row.restore} | {limit} | {row.way_out} |"
    yield ""
    yield "| from | to | when |"
    yield "|---|---|---|"
    for phase, row in PHASES.items():
        for following, when in row.next.items():
            yield f"| {phase} | {following} | {when} |"
    yield ""


def _diagram(steps: Mapping[S, Mapping[S, str]]) -> Iterator[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {Stage.PREPARING}"
    for state, following in steps.items():
        for other in following:
            yield f"    {state} --> {other}"
        if not following:
            yield f"    {state} --> [*]"
    yield "```\n"
