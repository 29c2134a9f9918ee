"""In whole clusters, anything may fail while layouts change: no token is wrong or lost, and every cluster recovers.

`make test-clusters CLUSTERS=200000` runs many more seeds.
"""

import os
import subprocess
import sys
from collections import Counter

import pytest

from services.planner.core import stages, transition
from services.planner.core.stages import STAGES, Stage
from services.worker.core.phases import DROP, RESTORE, On, State, Then
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import AbortRequested, LayersGivenUp, PeerLost, PreparationFailed
from tests.support.cluster_campaign import story
from tests.support.cluster_swarm import Kind

SEEDS = 375  # default number of seeds, of which a commit's gate runs a third
CHUNK = 125
_SEEN = ("drop done", "restore done", "restore aborted", "moved", "stayed", "leaving", "parked", "waking")
LONG_SEEDS = int(os.environ.get("BALLAST_CLUSTER_SEEDS", "8000"))
LONG_CHUNK = 500


def run(first: int, last: int) -> tuple[Counter[str], set[str]]:
    """Runs the seeds. Returns the number of transitions, migrations and parkings by outcome, and the kinds of faults
    that occurred.
    """
    ended, kinds = Counter[str](), set[str]()
    for seed in range(first, last):
        told = story(seed)
        ended += told.transitions + told.migrated + told.standings
        kinds |= {kind for kind, _ in told.met}
    return ended, kinds


def are_well_again(first: int) -> None:
    ended, kinds = run(first, first + CHUNK)
    assert min(ended[what] for what in _SEEN) > 0, ended
    assert len(kinds) > len(Kind) // 2, f"too few kinds of faults occurred; missing: {set(Kind) - kinds}"


@pytest.mark.rotating
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(CHUNK, SEEDS, CHUNK))
def test_a_cluster_recovers_from_its_faults(first: int) -> None:
    are_well_again(first)


@pytest.mark.rotating
@pytest.mark.timeout(1200)
def test_every_step_of_the_transition_tables_occurs_under_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step in the transition tables occurs, except those whose causes this simulation lacks."""
    seen: Counter[tuple[Stage, Stage]] = Counter()
    gone: Counter[tuple[State, On | Then]] = Counter()
    go = Transition._go

    def note_stage(before: Stage, after: Stage) -> None:
        seen[before, after] += before is not after
        stages.check_step(before, after)

    def note_way(self: Transition, way: On | Then) -> None:
        gone[self.state, way] += 1
        go(self, way)

    monkeypatch.setattr(transition, "check_step", note_stage)
    monkeypatch.setattr(Transition, "_go", note_way)
    are_well_again(0)
    steps = {(stage, following) for stage, row in STAGES.items() for following in row.next}
    assert steps - (+seen).keys() <= {(Stage.ABORTING, Stage.COMMITTING), (Stage.PREPARING, Stage.ABORTED)}
    rare = (PeerLost, PreparationFailed, AbortRequested, LayersGivenUp)  # rare in some states; unit tests cover them
    gone_to = {(state, way.to) for state, way in gone}
    for state, row in (*DROP.items(), *RESTORE.items()):
        common = [way for way in row.ways if way.to and (isinstance(way, Then) or way.event not in rare)]
        assert {(state, way.to) for way in common} <= gone_to


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + LONG_SEEDS, LONG_CHUNK))
def test_many_more_of_them(first: int) -> None:
    run(first, min(first + LONG_CHUNK, SEEDS + LONG_SEEDS))


def test_a_story_depends_on_its_seed_only() -> None:
    def traces(hash_seed: str) -> str:
        command = [sys.executable, "-m", "tests.support.cluster_campaign", "0", "4"]
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=110).stdout

    assert traces("1") == traces("2")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "mutant",
    [
        "B1-outside-not-told",
        "B9-refused-transfer",
        "claims-ignored",
        "epochs-not-raised",
        "migrated-before-all-stages-have-it",
        "resumed-before-its-KV",
        "silence-is-death",
        "swapped-out-for-good",
        "withdrawal-untold",
        "wrong-block",
    ],
)
def test_a_reintroduced_bug_is_detected(mutant: str) -> None:
    command = [sys.executable, "-m", "tests.support.mutants", "--seeds", "300", mutant]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500).stdout
    assert "seed" in told
    assert "not seen" not in told, told
