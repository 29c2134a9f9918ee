"""Generates `docs/transitions.md` from the tables; `make pages` writes it."""

from collections.abc import Iterable, Iterator, Mapping

from ballast.common.transition import TransitionKind
from services.planner.core.stages import STAGES, CoordinatorRules
from services.worker.core.phases import DROP, RESTORE, On, Row, State, Then

_HEAD = """# Transitions

`make pages` generates this page from the tables that the code executes: `services/planner/core/stages.py` has the
stages of the planner, and `services/worker/core/phases.py` the states of a member, both with their deadlines.

A drop merges instances into a pipeline, a restore dissolves it. The planner coordinates both as a two-phase protocol
among the members whose groups change, and records its decisions in a journal. If a member is lost, the others leave
their group and the layout at once, without a transition. Each then loads its missing layers and is added to the layout
again.
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
    yield f"The planner waits at most {rules.bereaved_s:g} s for a member that expects data from a lost member."
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
    yield "Events that a state does not list are ignored in that state.\n"
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
