"""Generates `docs/transitions.md` from the tables; `make pages` writes it."""

from collections.abc import Iterable, Iterator, Mapping

from ballast.common.transition import TransitionKind
from services.planner.core.stages import STAGES, CoordinatorRules
from services.worker.core.phases import DROP, RESTORE, On, Row, State, Then

_HEAD = """# Transitions

Written by `make pages` from the tables in the code: every step of the planner is held against
`services/planner/core/stages.py`, a member runs from `services/worker/core/phases.py`, and deadlines are theirs.

A drop merges instances into a pipeline, a restore takes it apart. The planner conducts both in two phases over the
members whose groups change; what has been decided is in its journal. After a loss the others leave their group and
the layout at once, without a transition; a restore of their own brings the layers back that they lack, and they are
placed again.
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
    yield from _member("A member in a drop", DROP)
    yield from _member("A member in a restore", RESTORE)


def _member(title: str, table: Mapping[State, Row]) -> Iterator[str]:
    states = [state for state in State if state in table]
    yield f"## {title}\n"
    yield from _diagram({state: dict.fromkeys(w.to for w in table[state].ways if w.to) for state in states})
    yield "| state | the planner sees | what the member does | deadline | way out |"
    yield "|---|---|---|---|---|"
    for state in states:
        row = table[state]
        limit = "-" if not row.ways else "the planner's" if row.deadline_s is None else f"{row.deadline_s:g} s"
        yield f"| {state} | {row.phase} | {row.does} | {limit} | {row.way_out} |"
    yield ""
    yield "What is not in a state's rows is not received: it changes nothing.\n"
    yield "| state | receives | if | does | goes to |"
    yield "|---|---|---|---|---|"
    for state in states:
        for way in table[state].ways:
            yield f"| {state} | {_way(way)} | {way.to or ''} |"
    yield ""


def _way(way: On | Then) -> str:
    event = f"`{way.event.__name__}`" if isinstance(way, On) else "at once"
    return " | ".join((event, *(f"`{what.__name__}`" if what is not None else "" for what in (way.when, way.do))))


def _diagram(steps: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """A Mermaid state diagram. `steps` begins with the initial state."""
    names = {state: state.replace(" ", "_") for state in steps}
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {next(iter(names.values()))}"
    for state, following in steps.items():
        for other in following:
            yield f"    {names[state]} --> {names[other]}"
        if not following:
            yield f"    {names[state]} --> [*]"
    yield "```\n"
