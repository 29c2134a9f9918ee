"""Every rotating test runs within as many commits as it has shares. If a module is marked as a whole, its tests run
in the same commits.
"""

import pytest

from tests.support import rotation

pytest_plugins = ["pytester"]

_TESTS = {
    "test_alone": """
        import pytest

        def test_always(): ...

        @pytest.mark.rotating
        @pytest.mark.parametrize("i", range(4))
        def test_sometimes(i): ...
    """,
    "test_whole": """
        import pytest

        pytestmark = pytest.mark.rotating(5)

        def test_one(): ...
        def test_two(): ...
    """,
}


def test_all_tests_run_within_as_many_turns_as_there_are_shares(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(**_TESTS)
    pytester.makeini("[pytest]\nmarkers = rotating: takes turns")
    items = pytester.inline_genitems()[0]
    seen = list[frozenset[str]]()
    for turn in range(15):
        monkeypatch.setattr(rotation, "_turn", lambda turn=turn: turn)
        others = rotation.of_other_commits(items)
        seen.append(frozenset(item.name for item in items if item not in others))
    assert all("test_always" in names for names in seen)
    assert all(("test_one" in names) == ("test_two" in names) for names in seen)
    for name in ("test_sometimes[0]", "test_sometimes[3]"):
        assert [name in names for names in seen].count(True) == 5
    assert ["test_one" in names for names in seen].count(True) == 3
