from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.common.errors import ConfigError
from tools.bench.traces import Trace, TraceRequest, read_trace, write_trace

OWN = "arrival_s,input_tokens,output_tokens\n7.5,10,3\n2.25,4,1\n8,1,0\n"
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,0,1087,Conversation log\n"
    "118,GPT-4,417,276,693,API log\n"
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
MOONCAKE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
    "\n"
    '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": []}\n'
)


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "name", "requests", "dropped"),
    [
        (OWN, "ballast", [(2.25, 4, 1), (7.5, 10, 3)], 1),
        ("\ufeff" + OWN.replace("\n", "\r\n"), "ballast", [(2.25, 4, 1), (7.5, 10, 3)], 1),
        (BURSTGPT, "burstgpt", [(0, 472, 18), (113, 417, 276)], 1),
        (AZURE, "azure", [(0, 374, 44), (4.314579, 396, 109)], 0),
        (AZURE.replace("0,3", "0+00:00,3"), "azure", [(0, 374, 44), (4.314579, 396, 109)], 0),
        (MOONCAKE, "mooncake", [(0, 6955, 52), (3.053, 6472, 26)], 0),
    ],
)
def test_published_formats(
    text: str, name: str, requests: list[tuple[float, int, int]], dropped: int, tmp_path: Path
) -> None:
    trace = read_trace(_write(tmp_path, text))
    assert trace.format == name
    assert trace.dropped_count == dropped
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests] == [r[1:] for r in requests]
    assert [r.arrival_s for r in trace.requests] == pytest.approx([r[0] for r in requests], abs=1e-5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "trace:1: is empty; the first line must name the columns: arrival_s"),
        ("0.5,10,3\n1,2,3\n", "trace:1: there is no header: '0.5,10,3'; put the line arrival_s,input_tokens"),
        ("arrival_s;input_tokens;output_tokens\n0,5;1;2\n", "trace:1: columns are separated by ';'"),
        ("a,b\n1,2\n", "trace:1: unknown header 'a,b'"),
        ("arrival_s,input_tokens,output_tokens\n", "holds no request"),
        ("arrival_s,input_tokens,output_tokens\n1,2,0\n", "holds no request: all 1 rows are without output or offline"),
        ('arrival_s,input_tokens,output_tokens\n"0,5",2,3\n', "trace:2: arrival_s .* '0,5'; write a decimal point"),
        (
            "arrival_s,input_tokens,output_tokens\n2024-05-01 12:00,2,3\n",
            "trace:2: .* a column that is called TIMESTAMP",
        ),
        (
            "arrival_s,input_tokens,output_tokens\n1,2,3\nx,2,3\n",
            "trace:3: arrival_s must be a number of seconds .* 'x'",
        ),
        ("arrival_s,input_tokens,output_tokens\n-1,2,3\n", "trace:2: arrival_s"),
        ("arrival_s,input_tokens,output_tokens\nnan,2,3\n", "trace:2: arrival_s"),
        ("arrival_s,input_tokens,output_tokens\n1,2.5,3\n", "trace:2: input_tokens must be a whole"),
        ("arrival_s,input_tokens,output_tokens\n1,0,3\n", "trace:2: input_tokens is 0"),
        (
            "arrival_s,input_tokens,output_tokens\n1,2\n",
            "trace:2: output_tokens must be a whole .* the row has no such column",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "trace:2: TIMESTAMP"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timest', "trace:2: is not JSON"),
        ('{"timestamp": 1, "input_length": true, "output_length": 3}\n', "trace:1: input_length"),
        ('{"timestamp": 1, "input_length": 2}\n', "trace:1: output_length"),
    ],
)
def test_errors_name_file_and_line(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        read_trace(_write(tmp_path, text))


def test_missing_and_binary_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="binary: is not a text file"):
        read_trace(tmp_path / "binary")


def _trace(*requests: tuple[float, int, int]) -> Trace:
    return Trace(source="here", format="ballast", requests=tuple(TraceRequest(*r) for r in requests))


def test_scaling_truncates_and_counts_long_requests() -> None:
    trace = _trace((0, 100, 50), (10, 1000, 60), (20, 3, 400), (30, 1, 1))
    scaled = trace.scaled(time_scale=0.5, length_scale=0.5, limit=3, max_total_tokens=101)
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in scaled.requests] == [
        (0, 50, 25),
        (5, 71, 30),
        (10, 1, 100),
    ]
    assert scaled.clamped_count == 2
    assert trace.scaled(length_scale=0.001).requests[0] == TraceRequest(0, 1, 1)
    assert trace.scaled(length_scale=0.1, answer_scale=2.0).requests[1] == TraceRequest(10, 100, 120)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"time_scale": 0}, "time-scale"),
        ({"length_scale": float("nan")}, "length-scale"),
        ({"answer_scale": 0}, "answer-scale"),
        ({"limit": 0}, "limit"),
        ({"max_total_tokens": 1}, "max-total-tokens"),
    ],
)
def test_senseless_scales_are_refused(arguments: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _trace((0, 1, 1)).scaled(**arguments)  # pyright: ignore[reportArgumentType] -- a bad value is the point


_REQUESTS = st.lists(
    st.tuples(st.integers(0, 10**6).map(lambda ms: ms / 1000), st.integers(1, 10**5), st.integers(1, 10**5)), min_size=1
).map(sorted)


@given(_REQUESTS, st.integers(2, 5000))
def test_clamped_requests_fit_and_the_rest_is_untouched(
    requests: list[tuple[float, int, int]], max_total_tokens: int
) -> None:
    trace = _trace(*requests)
    scaled = trace.scaled(max_total_tokens=max_total_tokens)
    changed = 0
    for before, after in zip(trace.requests, scaled.requests, strict=True):
        assert after.input_tokens >= 1
        assert after.output_tokens >= 1
        assert after.input_tokens + after.output_tokens <= max_total_tokens
        fits = before.input_tokens + before.output_tokens <= max_total_tokens
        assert (before == after) == fits
        changed += not fits
    assert scaled.clamped_count == changed


def test_a_written_trace_reads_back(tmp_path: Path) -> None:
    trace = _trace((0.125, 5, 6), (3.0, 7, 8))
    write_trace(tmp_path / "t.csv", trace.requests)
    assert read_trace(tmp_path / "t.csv").requests == trace.requests


def test_offline_requests_of_a_recording_have_no_goal(tmp_path: Path) -> None:
    path = tmp_path / "recorded.csv"
    path.write_text("arrival_s,input_tokens,output_tokens,class\n1,10,5,default\n2,900,800,batch\n3,20,5,interactive\n")
    trace = read_trace(path)
    assert [r.input_tokens for r in trace.requests] == [10, 20]
    assert trace.dropped_count == 1
