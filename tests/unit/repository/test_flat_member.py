"""All effects of a member go through one loop: code that executes a command never raises an event itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

PIPELINE = Path(__file__).resolve().parents[3] / "services/worker/pipeline"
_LOOP = "drive"  # the method of `TransitionDriver` through which events enter
_BEGINS = ("driver.py", "member.py")  # files that may call it, with the events of a member


def methods_of(file: str, name: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((PIPELINE / file).read_text())
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}


def attributes(node: ast.AST) -> Iterator[str]:
    """The names of all attributes in the code, whether they are called or only passed on."""
    return (part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute))


def reached_from(methods: dict[str, ast.FunctionDef], *first: str) -> dict[str, ast.FunctionDef]:
    found, fresh = dict[str, ast.FunctionDef](), list(first)
    while fresh:
        name = fresh.pop()
        if name in found or name not in methods:
            continue
        found[name] = methods[name]
        fresh += attributes(methods[name])
    return found


def test_no_command_of_a_transition_drives_it() -> None:
    driver = methods_of("driver.py", "TransitionDriver")
    carried_out = reached_from(driver, "_execute")
    assert {"_take_up", "_dissolve", "_lead", "_release_lost"} <= set(carried_out)
    assert _LOOP not in carried_out
    assert _LOOP in reached_from(driver, "poll"), "otherwise this test proves nothing"


def test_callbacks_of_a_member_do_not_drive_the_loop() -> None:
    carried_out = reached_from(methods_of("member.py", "GroupMember"), "_break_up", "run")
    assert {name for name, node in carried_out.items() if _LOOP in attributes(node)} == set()


def test_the_loop_runs_once_and_its_events_begin_in_two_files() -> None:
    driver = methods_of("driver.py", "TransitionDriver")
    assert _LOOP not in attributes(driver[_LOOP])
    assert [name for name, node in driver.items() if name != _LOOP and "_handle" in attributes(node)] == []
    callers = [p.name for p in PIPELINE.rglob("*.py") if _LOOP in attributes(ast.parse(p.read_text()))]
    assert sorted(callers) == list(_BEGINS)
