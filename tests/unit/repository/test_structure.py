"""Structural rules of the code: constructors are short, and the simulator makes no undocumented decisions."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_MOST_ARGUMENTS = 8
_MOST_LINES = 600
_CODE = {".py", ".cpp", ".h", ".c", ".cu", ".proto", ".js", ".css", ".html", ".sh"}
# Names on which protocols between services depend. Code that branches on one of them may be making a decision.
_PROTOCOL = {
    *("active", "serving", "token", "_token", "floor", "lease"),
    *("epoch", "_oldest_epoch", "phase", "stage", "stages", "call", "met", "incarnation"),
    *("at_rest", "backlog", "has_work", "in_flight_count", "may_form", "role", "wakes_at_s"),
}


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{within}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{within}{node.name}", node


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def looked_at_in_branches(function: ast.FunctionDef) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Match(subject=test):
                tests = [test]
            case ast.comprehension(ifs=ifs):
                tests = ifs
            case _:
                continue
        found |= {part.attr for test in tests for part in ast.walk(test) if isinstance(part, ast.Attribute)}
    return found


def test_a_file_of_code_has_at_most_600_lines() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    counts = {
        name: len((ROOT / name).read_text().splitlines())
        for name in tracked
        if Path(name).suffix in _CODE and not name.startswith("ballastpb/") and (ROOT / name).exists()
    }
    assert len(counts) > 500
    assert {name: count for name, count in counts.items() if count > _MOST_LINES} == {}


def test_constructors_of_members_executors_and_simulated_nodes_are_short() -> None:
    counts = {
        f"{path} {name}": len(node.args.args) + len(node.args.kwonlyargs) - 1
        for path, tree in sources("services/worker", "services/planner", "services/monitor", "sim")
        for name, node in functions(tree)
        if name.endswith(".__init__")
    }
    assert len(counts) > 100
    assert {name: count for name, count in counts.items() if count > _MOST_ARGUMENTS} == {}


def test_branches_of_the_simulator_are_listed_with_their_reasons() -> None:
    branching = {
        (Path(path).name, name)
        for path, tree in sources("sim")
        for name, node in functions(tree)
        if looked_at_in_branches(node) & _PROTOCOL and "/jobs/" not in path
    }
    listed: set[tuple[str, str]] = set()
    for row in re.findall(r"^\| (`\w+\.py`:.*?) \|", (ROOT / "docs/simulator.md").read_text(), re.MULTILINE):
        file = owner = ""
        for name in re.findall(r"`([\w.]+)`", row):
            if name.endswith(".py"):
                file = name
                continue
            before, _, method = name.rpartition(".")
            owner = before or owner
            listed.add((file, f"{owner}.{method}"))
    assert branching - listed == set(), "docs/simulator.md does not say why"
    there = {(Path(path).name, name) for path, tree in sources("sim") for name, _ in functions(tree)}
    assert listed - there == set(), "docs/simulator.md names functions that no longer exist"


def test_no_more_classes_share_a_name() -> None:
    """A search for a class should find one. The limit may only fall; names are compared without leading underscores."""
    folders = ("services", "ballast", "sim", "tools", "benchmarks")
    trees = [tree for _, tree in sources(*folders)]
    names = Counter(n.name.lstrip("_") for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    shared = {name: count for name, count in names.items() if count > 1}
    assert sum(shared.values()) <= 36, sorted(shared)
