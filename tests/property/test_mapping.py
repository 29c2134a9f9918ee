"""Every record survives being encoded into its protobuf message and decoded again."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ballast.client import codec as client_codec
from ballast.common.sampling import Grammar, GrammarKind, SamplingParams
from ballast.rpc import codec, mapping, transition

MAPPERS: dict[str, mapping.Mapper[Any, Any]] = {
    f"{module.__name__.split('.')[-1]}.{name}": found
    for module in (codec, transition, client_codec)
    for name, found in vars(module).items()
    if isinstance(found, mapping.Mapper)
}

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_SINGLE = st.floats(width=32, allow_nan=False)  # logprobs are single precision on the wire

st.register_type_strategy(int, st.integers(0, 2**31 - 1))
st.register_type_strategy(float, _SINGLE)
st.register_type_strategy(str, _TEXT)
st.register_type_strategy(
    SamplingParams,
    st.builds(
        SamplingParams,
        max_tokens=st.integers(10, 2**31 - 1),
        min_tokens=st.integers(0, 10),
        temperature=st.floats(0.0, 100.0),
        top_p=st.floats(0.0, 1.0, exclude_min=True),
        top_k=st.integers(0, 2**31 - 1),
        min_p=st.floats(0.0, 1.0),
        repetition_penalty=st.floats(0.0, 100.0, exclude_min=True),
        presence_penalty=st.floats(-2.0, 2.0),
        frequency_penalty=st.floats(-2.0, 2.0),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        stop=st.lists(st.text("abcé\n", min_size=1, max_size=9), max_size=3).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
        bad_words=st.lists(st.text("ab ", min_size=1).filter(str.strip), max_size=3).map(tuple),
        bad_words_token_ids=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple)).map(tuple),
        allowed_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
        logprobs=st.none() | st.integers(0, 20),
        logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100, width=32), max_size=3),
    )
    | st.builds(SamplingParams, grammar=st.builds(Grammar, st.sampled_from(GrammarKind), _TEXT))
    | st.builds(SamplingParams, logprobs=st.integers(0, 20), prompt_logprobs=st.integers(0, 20)),
)


@pytest.fixture(scope="module", autouse=True)
def no_checks() -> Iterator[None]:
    """Disables validation, since invalid values must survive the round trip, too. Other tests cover refusals."""
    with pytest.MonkeyPatch.context() as patch:
        for mapper in MAPPERS.values():
            patch.setattr(mapper, "_check", None)
        yield


@pytest.mark.parametrize("name", MAPPERS)
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_a_record_survives_a_round_trip(name: str, data: st.DataObject) -> None:
    mapper = MAPPERS[name]
    record = data.draw(st.from_type(mapper.record_type))
    said = {field: getattr(record, field) for field in mapper.given if hasattr(record, field)}
    back = mapper.from_bytes(mapper.to_bytes(record), **said)
    assert _plain(back) == _plain(record)


def _plain(value: Any) -> Any:
    """A form that compares equal for equal records and treats -0.0 as 0.0."""
    if is_dataclass(value):
        return type(value).__name__, {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return 0.0 if isinstance(value, float) and math.isclose(value, 0.0, abs_tol=0.0) else value
