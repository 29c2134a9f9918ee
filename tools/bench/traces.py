"""Request traces: arrival times and token counts. Reads the published formats and scales traces.

| format   | recognised by                                | time                    |
|----------|----------------------------------------------|-------------------------|
| ballast  | `arrival_s,input_tokens,output_tokens`       | seconds                 |
| burstgpt | `Timestamp`, `Request tokens`, `Response tokens` | seconds             |
| azure    | `TIMESTAMP,ContextTokens,GeneratedTokens`    | date and time           |
| mooncake | JSON lines with `timestamp`, `input_length`, `output_length` | milliseconds |

In all formats but `ballast`, times are made relative to the first arrival; a trace of the format `ballast` may begin
with a pause, and its optional column `class` marks offline requests (`batch`). These have no goal; they and rows
without output (failed requests of the source) are left out and counted. Rows are sorted by arrival (stable).
"""

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import TextIOBase
from pathlib import Path
from typing import Any, cast

from ballast.common.errors import ConfigError
from ballast.common.sampling import PriorityClass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    source: str
    format: str
    requests: tuple[TraceRequest, ...]  # in order of arrival
    dropped_count: int = 0  # rows without output, or of offline requests
    clamped_count: int = 0  # requests that `scaled` has cut to the maximum length
    rate_scale: float = 1.0  # factor on the number of requests that `tools.bench.upscale` has applied
    lengths: str = "of the trace"  # source of the lengths

    @property
    def span_s(self) -> float:
        """Time of the last arrival, in seconds."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    def scaled(
        self,
        *,
        time_scale: float = 1.0,
        length_scale: float = 1.0,
        answer_scale: float | None = None,
        limit: int | None = None,
        max_total_tokens: int | None = None,
    ) -> "Trace":
        """The first `limit` requests with arrivals multiplied by `time_scale` and lengths by `length_scale`.

        `answer_scale`: factor on the lengths of answers; None: `length_scale`. A time scale of 0.5 makes the trace
        twice as fast. Lengths are rounded, to at least one token. If input and output together exceed
        `max_total_tokens`, the input is truncated, and the output only if it is too long by itself; `clamped_count`
        counts these requests.

        Raises:
            ConfigError: an argument is out of range.
        """
        _positive("time-scale", time_scale)
        _positive("length-scale", length_scale)
        answer_scale = length_scale if answer_scale is None else answer_scale
        _positive("answer-scale", answer_scale)
        if limit is not None and limit < 1:
            raise ConfigError("limit", f"must be at least 1, got {limit}")
        if max_total_tokens is not None and max_total_tokens < 2:
            raise ConfigError("max-total-tokens", f"must be at least 2, got {max_total_tokens}")
        clamped_count = 0
        requests: list[TraceRequest] = []
        for request in self.requests[:limit]:
            wanted = (_scale(request.input_tokens, length_scale), _scale(request.output_tokens, answer_scale))
            kept = wanted if max_total_tokens is None else _clamp(*wanted, max_total_tokens)
            clamped_count += kept != wanted
            requests.append(TraceRequest(request.arrival_s * time_scale, *kept))
        return replace(self, requests=tuple(requests), clamped_count=clamped_count)


def _positive(name: str, value: float) -> None:
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(name, f"must be a number above 0, got {value}")


def _scale(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))


def _clamp(input_tokens: int, output_tokens: int, max_total_tokens: int) -> tuple[int, int]:
    output_tokens = min(output_tokens, max_total_tokens - 1)
    return min(input_tokens, max_total_tokens - output_tokens), output_tokens


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    columns: tuple[str, str, str]  # names of the columns of arrival, input and output
    parse_s: Callable[[Any], float]
    from_first_row: bool


def _date_s(text: str) -> float:
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()  # UTC skips and repeats no hour


_OFFLINE = {each.value for each in PriorityClass if each.offline}

_CSV_FORMATS = (
    _Format("ballast", ("arrival_s", "input_tokens", "output_tokens"), float, False),
    _Format("burstgpt", ("Timestamp", "Request tokens", "Response tokens"), float, True),
    _Format("azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date_s, True),
)
_MOONCAKE = _Format("mooncake", ("timestamp", "input_length", "output_length"), lambda ms: float(ms) / 1000, True)


def read_trace(path: Path) -> Trace:
    """Read a trace in any of the formats above.

    Raises:
        ConfigError: the file cannot be read, is invalid or has no request; the message names file and line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            trace_format, rows = _open_rows(path, file)
            requests, dropped_count = _read_rows(path, trace_format, rows)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "is not a text file in UTF-8") from error
    if not requests:
        why = (
            f"all {dropped_count} rows are without output or offline" if dropped_count else "nothing follows the header"
        )
        raise ConfigError(str(path), f"holds no request: {why}")
    start_s = min(r.arrival_s for r in requests) if trace_format.from_first_row else 0.0
    ordered = sorted((replace(r, arrival_s=r.arrival_s - start_s) for r in requests), key=lambda r: r.arrival_s)
    return Trace(source=str(path), format=trace_format.name, requests=tuple(ordered), dropped_count=dropped_count)


Row = dict[str, Any]  # Any: cells are text in CSV, any JSON value in JSON lines


def _open_rows(path: Path, file: TextIOBase) -> tuple[_Format, Iterator[tuple[int, Row]]]:
    """(format, iterator of (line number, row)). The first line determines the format."""
    first = file.readline()
    file.seek(0)
    if first.lstrip().startswith("{"):
        return _MOONCAKE, _json_rows(path, file)
    reader = csv.DictReader(file)
    header = [name.strip() for name in reader.fieldnames or []]
    reader.fieldnames = header
    for candidate in _CSV_FORMATS:
        if set(candidate.columns) <= set(header):
            return candidate, _csv_rows(path, reader)
    raise ConfigError(f"{path}:1", _no_header(first.strip()))


def _no_header(line: str) -> str:
    """The error message for a file whose first line, `line`, does not name the columns of a known format."""
    own = ",".join(_CSV_FORMATS[0].columns)
    shown = f"{line[:120]!r}"
    if not line:
        return f"is empty; the first line must name the columns: {own}"
    if "," not in line and any(mark in line for mark in ";\t|"):
        mark = next(mark for mark in ";\t|" if mark in line)
        return f"columns are separated by {mark!r}: {shown}; write commas, and points for decimals, under {own}"
    if any(character.isdigit() for character in line.split(",")[0][:1]):
        return f"there is no header: {shown}; put the line {own} before it (seconds, tokens, tokens)"
    others = "; ".join(f"{f.name} {','.join(f.columns)}" for f in (*_CSV_FORMATS[1:], _MOONCAKE))
    return (
        f"unknown header {shown}; name the columns {own} (seconds from the start, tokens of the prompt, tokens of the"
        f" answer). Published files are read, too: {others}"
    )


def _csv_rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[tuple[int, Row]]:
    try:
        for row in reader:
            yield reader.line_num, cast("Row", row)
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}", str(error)) from error


def _json_rows(path: Path, file: TextIOBase) -> Iterator[tuple[int, Row]]:
    for line_number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{line_number}", f"is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{line_number}", "is not a JSON object")
        yield line_number, cast("Row", row)


def _read_rows(path: Path, trace_format: _Format, rows: Iterator[tuple[int, Row]]) -> tuple[list[TraceRequest], int]:
    requests: list[TraceRequest] = []
    dropped_count = 0
    arrival_column, input_column, output_column = trace_format.columns
    for line_number, row in rows:
        where = f"{path}:{line_number}"
        output_tokens = _tokens(where, output_column, row.get(output_column))
        if output_tokens == 0 or row.get("class") in _OFFLINE:
            dropped_count += 1
            continue
        input_tokens = _tokens(where, input_column, row.get(input_column))
        if input_tokens == 0:
            raise ConfigError(where, f"{input_column} is 0; a request has at least one prompt token")
        arrival_s = _arrival_s(where, arrival_column, row.get(arrival_column), trace_format.parse_s)
        requests.append(TraceRequest(arrival_s, input_tokens, output_tokens))
    return requests, dropped_count


def _tokens(where: str, column: str, cell: object) -> int:
    try:
        value = float(cast("str", cell))
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(cell, bool) or not math.isfinite(value) or value < 0 or value != int(value):
        raise ConfigError(where, f"{column} must be a whole number of tokens, {_got(cell)}")
    return int(value)


def _arrival_s(where: str, column: str, cell: object, parse_s: Callable[[Any], float]) -> float:
    try:
        value = parse_s(cell)
    except (TypeError, ValueError, AttributeError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigError(where, f"{column} must be {_TIMES[parse_s is _date_s]}, {_got(cell)}")
    return value


_TIMES = {False: "a number of seconds from 0 on", True: "a date and time such as 2024-05-10 00:00:00.009"}


def _got(cell: object) -> str:
    """Describe an invalid value for an error message, with a hint if the mistake is a common one."""
    if cell is None:
        return "and the row has no such column: it is too short"
    hint = ""
    if isinstance(cell, str):
        if "," in cell and cell.replace(",", "", 1).strip().isdigit():
            hint = "; write a decimal point in the place of the comma"
        elif _is_date(cell):
            hint = "; dates are read from a column that is called TIMESTAMP, beside ContextTokens,GeneratedTokens"
    return f"got {cell!r}{hint}"


def _is_date(text: str) -> bool:
    try:
        return _date_s(text) > 0
    except ValueError:
        return False


def write_trace(path: Path, requests: tuple[TraceRequest, ...]) -> None:
    """Write a trace in the format `ballast`, with times to the millisecond."""
    lines = [f"{r.arrival_s:.3f},{r.input_tokens},{r.output_tokens}\n" for r in requests]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(lines))
