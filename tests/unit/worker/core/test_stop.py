from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.common.sampling import FinishReason, SamplingParams
from services.worker.core.stop import StopRule, StopText


def rule(
    *, max_output_count: int = 100, eos: frozenset[int] = frozenset({9}), text: bool = True, **sampling: object
) -> StopRule:
    params = SamplingParams(**sampling)  # pyright: ignore[reportArgumentType]
    matcher = StopText(params.stop, params.include_stop_str_in_output, "", 0) if text else None
    return StopRule(params, eos, min(max_output_count, params.max_tokens), matcher)


def take_all(stop: StopRule, pieces: list[str]) -> list[str]:
    """The text released by each piece, up to the piece at which generation stops."""
    released: list[str] = []
    for index, piece in enumerate(pieces, 1):
        released.append(stop.take(1, index, piece))
        if stop.finish_reason is not None:
            break
    return released


def test_text_passes_straight_through_without_stop_strings() -> None:
    assert take_all(rule(), ["Hel", "lo", "", " you"]) == ["Hel", "lo", "", " you"]


def test_a_stop_string_over_three_tokens_is_never_shown() -> None:
    stop = rule(stop=("</end>",))
    assert take_all(stop, ["text <", "/en", "d> more"]) == ["text ", "", ""]
    assert (stop.finish_reason, stop.matched_stop) == (FinishReason.STOP, "</end>")


def test_text_that_only_resembled_a_stop_string_is_released() -> None:
    stop = rule(stop=("</end>",))
    assert take_all(stop, ["a <", "/e", "lse", " <"]) == ["a ", "", "</else", " "]
    assert stop.flush() == "<"


def test_a_stop_string_may_be_included() -> None:
    stop = rule(stop=("END",), include_stop_str_in_output=True)
    assert take_all(stop, ["one E", "ND two"]) == ["one ", "END"]


def test_the_stop_string_completed_first_wins() -> None:
    stop = rule(stop=("abcd", "bc"))
    assert take_all(stop, ["x a", "b", "c", "d"]) == ["x ", "", "a"]
    assert stop.matched_stop == "bc"


def test_the_longer_of_two_stop_strings_that_end_together_wins() -> None:
    stop = rule(stop=("cd", "abcd"))
    assert take_all(stop, ["x abcd y"]) == ["x "]
    assert stop.matched_stop == "abcd"


def test_stop_strings_within_the_first_min_tokens_do_not_count() -> None:
    stop = rule(stop=("b",), min_tokens=2)
    assert take_all(stop, ["b", "ab", "c", "db", "e"]) == ["b", "ab", "c", "d"]


def test_a_stop_string_that_ends_after_min_tokens_counts_wherever_it_begins() -> None:
    stop = rule(stop=("abc",), min_tokens=2)
    assert take_all(stop, ["a", "b", "c"]) == ["", "", ""]
    assert stop.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("include", [False, True])
def test_end_of_sequence_releases_held_text_and_its_own_only_if_included(include: bool) -> None:
    stop = rule(stop=("xyz",), include_stop_str_in_output=include)
    assert stop.take(1, 1, "ab x") == "ab "
    assert stop.take(9, 2, "</s>") == ("x</s>" if include else "x")
    assert (stop.finish_reason, stop.matched_stop) == (FinishReason.STOP, "9")


def test_ignore_eos_ignores_only_the_models_own_end() -> None:
    stop = rule(ignore_eos=True, stop_token_ids=(5,))
    stop.take(9, 1, "")
    assert stop.finish_reason is None
    stop.take(5, 2, "")
    assert (stop.finish_reason, stop.matched_stop) == (FinishReason.STOP, "5")


def test_end_of_sequence_within_min_tokens_is_ignored() -> None:
    stop = rule(min_tokens=2)
    for index in (1, 2):
        stop.take(9, index, "")
        assert stop.finish_reason is None
    stop.take(9, 3, "")
    assert stop.finish_reason is FinishReason.STOP


def test_the_maximum_length_ends_the_text_and_releases_held_text() -> None:
    stop = rule(stop=("zz",), max_tokens=2)
    assert take_all(stop, ["a", "z"]) == ["a", "z"]
    assert stop.finish_reason is FinishReason.LENGTH


def test_the_models_maximum_length_ends_a_text_before_max_tokens() -> None:
    stop = rule(max_tokens=50, max_output_count=2, text=False)
    take_all(stop, ["", ""])
    assert stop.finish_reason is FinishReason.LENGTH


def test_a_stop_with_the_last_token_is_a_stop() -> None:
    stop = rule(max_tokens=1)
    stop.take(9, 1, "")
    assert stop.finish_reason is FinishReason.STOP


def test_a_resumed_text_is_not_sent_again_and_its_held_end_still_matches() -> None:
    text = StopText(("END",), False, "one two E", delivered_chars=4)
    assert text.feed("N", True) == ("two ", None)
    assert text.feed("D!", True) == ("", "END")


def test_a_stop_string_that_an_earlier_attempt_passed_does_not_count_again() -> None:
    text = StopText(("b",), False, "ab", delivered_chars=1)
    assert text.feed("c", True) == ("bc", None)


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [([1, 9], FinishReason.STOP), ([1, 1, 1], FinishReason.LENGTH), ([9, 1], None), ([9], None)],
)
def test_a_resumed_text_may_already_be_complete(token_ids: list[int], reason: FinishReason | None) -> None:
    stop = rule(max_tokens=3, min_tokens=1)
    stop.resume(token_ids)
    assert stop.finish_reason is reason


TEXTS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@given(TEXTS, STOPS, st.booleans(), st.lists(st.integers(0, 24), max_size=8))
def test_the_split_into_tokens_does_not_matter(
    text: str, stops: tuple[str, ...], include: bool, cuts: list[int]
) -> None:
    bounds = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    by_char = _shown(list(text), stops, include)
    assert _shown([text[a:b] for a, b in pairwise(bounds)], stops, include) == by_char
    ends = [(begin + len(s), begin, s) for s in stops for begin in range(len(text)) if text.startswith(s, begin)]
    if ends:
        end, begin, stop = min(ends)
        assert by_char == (text[: end if include else begin], stop)
    else:
        assert by_char == (text, None)


def _shown(pieces: list[str], stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    matcher = StopText(stops, include, "", 0)
    shown = ""
    for piece in pieces:
        released, matched = matcher.feed(piece, True)
        shown += released
        if matched is not None:
            return shown, matched
    return shown + matcher.flush(), None
