"""Incremental parsing of an answer's text into events.

A format is a generator over a `Scanner`, which yields events, and `None` if it needs more text. Its events do not
depend on how the text was split into pieces, except for the splits of deltas.
"""

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Part of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Part of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call of the named function."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Part of the JSON text of the current call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call. `complete`: False if the answer ended within its arguments."""

    complete: bool


Event = Text | Reasoning | CallBegin | Arguments | CallEnd


class Scanner:
    """The text of an answer so far, and the position `at` up to which it is parsed."""

    __slots__ = ("at", "cut", "ended", "passes_text", "starved", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False  # True: the answer ended at its token limit
        self.passes_text = False  # True: all text that follows is content
        self.starved = False  # True: more text was needed after the end of the answer

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def take(self, count: int) -> str:
        self.at += count
        return self.text[self.at - count : self.at]


Events = Generator[Event | None, None, None]  # None: more text is needed
Test = Generator[Event | None, None, bool]
Found = Generator[Event | None, None, str | None]
_RAW = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_BEHIND_A_WORD = frozenset(",;}] \t\r\n<")

Body = Callable[[Scanner], Test]
Format = Callable[[Scanner], Events]


class AnswerParser:
    """Parses the text of one choice. `feed` takes its pieces, and `finish` ends it.

    Args:
        parse: The format of the text.
        most_calls: Maximum number of calls; further ones are dropped. None: unlimited.
        thought_end_id: The token that ends the reasoning; None: it is not a single token.
    """

    def __init__(self, parse: Format, most_calls: int | None = None, thought_end_id: int | None = None) -> None:
        self._scanner = Scanner()
        self._events = parse(self._scanner)
        self._is_over = False
        self._most_calls = most_calls
        self._call_count = 0
        self._thought_end_id = thought_end_id
        self._token_count = 0
        self._thought_chars = 0
        self._thought_count = 0
        self._is_thinking = False
        self._thought_ends: list[int] = []  # number of tokens up to and including each `thought_end_id`

    @property
    def reasoning_token_count(self) -> int:
        """Number of reasoning tokens so far. If no single token ends the reasoning, the number is estimated from the
        reasoning's share of the text.
        """
        if not self._thought_chars:
            return 0
        if self._thought_end_id is not None:  # not the last such token, because it may also occur in text
            ended = len(self._thought_ends) >= self._thought_count
            return self._thought_ends[self._thought_count - 1] if ended else self._token_count
        return round(self._token_count * min(1.0, self._thought_chars / len(self._scanner.text)))

    @property
    def passes_text(self) -> bool:
        """True if all text that follows is content, so that it need not be parsed."""
        return self._scanner.passes_text

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        if self._thought_end_id in token_ids:
            ends = (at for at, token_id in enumerate(token_ids, 1) if token_id == self._thought_end_id)
            self._thought_ends += [self._token_count + at for at in ends]
        self._token_count += len(token_ids)
        self._scanner.text += text
        return self._run()

    def whole(self, text: str, token_ids: Sequence[int], *, cut: bool) -> list[Event]:
        """Parse a complete answer, instead of `feed` and `finish`, and return all events. `cut`: see `finish`."""
        self._scanner.ended, self._scanner.cut = True, cut
        return self.feed(text, token_ids)

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the answer, and return the remaining events. `cut`: the answer ended at its token limit, so that an
        unrecognised beginning of a call is dropped instead of becoming text.
        """
        self._scanner.ended, self._scanner.cut = True, cut
        return self._run()

    def _run(self) -> list[Event]:
        found: list[Event] = []
        while not self._is_over:
            try:
                event = next(self._events)
            except StopIteration:
                self._is_over = True
                break
            if event is None:
                break
            self._call_count += isinstance(event, CallBegin)
            is_thought = isinstance(event, Reasoning)
            self._thought_chars += len(event.text) if is_thought else 0
            self._thought_count += is_thought and not self._is_thinking
            self._is_thinking = is_thought
            is_of_call = isinstance(event, (CallBegin, Arguments, CallEnd))
            if not (is_of_call and self._most_calls is not None and self._call_count > self._most_calls):
                _add(found, event)
        return found


def _add(events: list[Event], event: Event) -> None:
    """Append an event, or merge it with the last one if both are text of the same kind, because a chunk has one
    delta.
    """
    last = events[-1] if events else None
    if isinstance(event, (Text, Reasoning, Arguments)) and type(last) is type(event):
        assert isinstance(last, (Text, Reasoning, Arguments)), "of the same type"
        events[-1] = type(event)(last.text + event.text)
    else:
        events.append(event)


def more(scanner: Scanner) -> Test:
    """Wait for more text; False if the answer has ended."""
    length = len(scanner.text)
    while len(scanner.text) == length:
        if scanner.ended:
            scanner.starved = True
            return False
        yield None
    return True


def until(scanner: Scanner, tags: Sequence[str], make: Callable[[str], Event]) -> Found:
    """Emit text up to the first of the tags, which is consumed and returned; None if the answer ends before a tag."""
    while True:
        rest = scanner.rest
        places = [(rest.find(tag), -len(tag), tag) for tag in tags if tag in rest]
        if places:
            place, _, tag = min(places)
            if place:
                yield make(scanner.take(place))
            scanner.take(len(tag))
            return tag
        keep = 0 if scanner.ended else max((_begun(rest, tag) for tag in tags), default=0)
        if len(rest) > keep:
            yield make(scanner.take(len(rest) - keep))
        if not (yield from more(scanner)) and not scanner.rest:
            return None


def until_trimmed(scanner: Scanner, tag: str, make: Callable[[str], Event], most: int) -> Found:
    """Like `until` for one tag, but drop up to `most` line breaks before it."""
    held = ""
    reading = until(scanner, (tag,), Text)
    while True:
        try:
            event = next(reading)
        except StopIteration as over:
            if len(held) > most:
                yield make(held[: len(held) - most])
            return over.value
        if isinstance(event, Text):
            text = held + event.text
            body = text.rstrip("\r\n")
            held = text[len(body) :]
            if body:
                yield make(body)
        else:
            yield event


def collect(scanner: Scanner, tags: Sequence[str]) -> Generator[Event | None, None, tuple[str, str | None]]:
    """Consume text up to and including the first of the tags; return (text, tag), where tag is None if the answer ends
    before a tag.
    """
    parts: list[str] = []
    reading = until(scanner, tags, Text)
    while True:
        try:
            event = next(reading)
        except StopIteration as over:
            return "".join(parts), over.value
        if event is None:
            yield None
        elif isinstance(event, Text):
            parts.append(event.text)


def _begun(text: str, tag: str) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


def space(scanner: Scanner, characters: str = " \t\r\n") -> Events:
    while True:
        rest = scanner.rest
        scanner.take(len(rest) - len(rest.lstrip(characters)))
        if scanner.rest or not (yield from more(scanner)):
            return


def literal(scanner: Scanner, text: str) -> Test:
    """Consume `text` if it follows; False if it does not."""
    while not scanner.rest.startswith(text):
        if not text.startswith(scanner.rest) or not (yield from more(scanner)):
            return False
    scanner.take(len(text))
    return True


def string(scanner: Scanner) -> Found:
    """Consume a JSON string and return it decoded; None if no string follows, or it is incomplete."""
    start = scanner.at
    if not (yield from value(scanner, None)):
        return None
    try:
        decoded: object = json.loads(scanner.text[start : scanner.at])
    except ValueError:
        return None
    return decoded if isinstance(decoded, str) else None


def value(scanner: Scanner, make: Callable[[str], Event] | None) -> Test:
    """Consume a JSON value, which ends at its last bracket or quote; True if it is complete. With `make`, the value is
    emitted as it arrives, unchanged except that raw line breaks and tabs within strings, which JSON forbids, are
    escaped. Without `make`, it is consumed only when complete.
    """
    depth, inside, escaped, begun = 0, False, False, False
    while True:
        rest = scanner.rest
        written: list[str] = []
        first = 0  # first character not yet emitted
        end: int | None = None
        for place, character in enumerate(rest):
            if inside:
                if escaped:
                    escaped = False
                elif character == "\\":
                    escaped = True
                elif character == '"':
                    inside = False
                elif character in _RAW:
                    written += rest[first:place], _RAW[character]
                    first = place + 1
            elif character == '"':
                inside = begun = True
            elif character in "{[":
                depth, begun = depth + 1, True
            elif depth:
                depth -= character in "}]"
            elif character in _BEHIND_A_WORD:
                end = place
                break
            else:
                begun = True
                continue
            if not (inside or depth):
                end = place + 1
                break
        if make is None:  # no text is consumed before the end, so rescan from the beginning
            if end is None and (yield from more(scanner)):
                depth, inside, escaped, begun = 0, False, False, False
                continue
        elif text := "".join(written) + rest[first:end]:
            yield make(text)
        if end is None and make is not None:
            scanner.take(len(rest))
            if (yield from more(scanner)):
                continue
        whole = begun and (end is not None or not (depth or inside))
        if make is None and whole:
            scanner.take(len(rest) if end is None else end)
        elif end is not None:
            scanner.take(end)
        return whole
