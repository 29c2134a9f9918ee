"""Random answers in every format (reasoning, text, tool calls), split at any position. BALLAST_ANSWERS sets the number
of answers per format.
"""

import json
import os
import random
import string
from collections.abc import Callable, Sequence

import pytest

from services.gateway.openai.formats import ToolFormat
from services.gateway.openai.scanner import AnswerParser, Arguments, CallBegin
from tests.unit.gateway.test_formats import DS_BEGIN, DS_END, Call, heard, of

ANSWERS = int(os.environ.get("BALLAST_ANSWERS", "100"))
_CHARS = string.ascii_letters + ' .,:;!?\n\t\\"/<>{}[]()|&éß漢👩‍👧'
_LURES = ("<tool_call>", "</tool_call>", "<think>", "[TOOL_CALLS]", "[ARGS]", "```", "}}", "<function=a>", "<|call|>")


class Written:
    """A random answer and its text in the format `kind`."""

    def __init__(self, rng: random.Random, kind: str) -> None:
        self._rng, self.kind = rng, kind
        self.thought = self._words(60) if rng.random() < 0.5 else ""
        self.said = self._words(60) if rng.random() < 0.6 else ""
        self.calls = [(rng.choice(("weather", "clock")), self._arguments()) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        if kind == "llama3_json" and self.calls:
            self.said = ""  # its calls are the whole answer

    def _words(self, most: int) -> str:
        letters = string.ascii_letters + " .,é漢👩‍👧"
        return "W" + "".join(self._rng.choice(letters) for _ in range(self._rng.randrange(most))) + "."

    def _text(self) -> str:
        """Random text. In formats that allow it, the text may resemble the delimiters of a call."""
        made = "".join(self._rng.choice(_CHARS) for _ in range(self._rng.randrange(30)))
        if self.kind in ("hermes", "llama3_json", "mistral") and self._rng.random() < 0.3:
            made += self._rng.choice(_LURES)
        return made

    def _value(self, depth: int = 0) -> object:
        rng = self._rng
        made: Sequence[Callable[[], object]] = (
            self._text,
            lambda: rng.randrange(-(10**9), 10**9),
            rng.random,
            lambda: rng.choice((True, False, None)),
            lambda: [self._value(depth + 1) for _ in range(rng.randrange(3))],
            lambda: {self._text(): self._value(depth + 1) for _ in range(rng.randrange(3))},
        )
        return rng.choice(made[:4] if depth > 2 else made)()

    def _arguments(self) -> str:
        rng = self._rng
        if self.kind in ("qwen3_coder", "glm45", "pythonic"):  # not JSON: each value has one spelling
            city = "".join(rng.choice(string.ascii_letters + " éß漢") for _ in range(rng.randrange(1, 20))).strip()
            given: dict[str, object] = {"city": city + "x", "days": rng.randrange(100)}
            return json.dumps(dict(list(given.items())[: rng.randrange(3)]), ensure_ascii=False)
        value = {f"k{i}": self._value() for i in range(rng.randrange(4))}
        spaced = rng.choice(((", ", ": "), (",", ":"), (" ,\n", " : ")))
        return json.dumps(value, ensure_ascii=rng.random() < 0.3, separators=spaced)

    @property
    def text(self) -> str:
        if self.kind == "openai":
            return self._channels()
        thought = f"<think>{self.thought}</think>\n\n" if self.thought else ""
        return thought + self.said + self._calls()

    def _channels(self) -> str:
        thought = f"<|channel|>analysis<|message|>{self.thought}<|end|><|start|>assistant" if self.thought else ""
        calls = "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
            for name, arguments in self.calls
        )
        final = f"<|channel|>final<|message|>{self.said}<|end|>{'<|start|>assistant' if calls else ''}"
        return thought + (final if self.said or not calls else "") + calls

    def _calls(self) -> str:
        one: dict[str, Callable[[str, str], str]] = {
            "hermes": lambda n, a: f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>',
            "llama3_json": lambda n, a: f'{{"name": "{n}", "parameters": {a}}}',
            "mistral": lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{a}",
            "deepseek_v3": lambda n, a: (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{a}\n```<｜tool▁call▁end｜>"
            ),
            "qwen3_coder": lambda n, a: f"<tool_call>\n<function={n}>\n{_qwen(a)}</function>\n</tool_call>",
            "glm45": lambda n, a: f"<tool_call>{n}\n{_glm(a)}</tool_call>",
            "pythonic": lambda n, a: f"{n}({', '.join(f'{k}={v!r}' for k, v in json.loads(a).items())})",
        }
        written = [one[self.kind](name, arguments) for name, arguments in self.calls]
        if not written:
            return ""
        match self.kind:
            case "llama3_json":
                return "; ".join(written)
            case "deepseek_v3":
                return f"{DS_BEGIN}{''.join(written)}{DS_END}"
            case "pythonic":
                return f"[{', '.join(written)}]"
            case _:
                return "\n".join(written) if self.kind != "mistral" else "".join(written)


def _qwen(arguments: str) -> str:
    return "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in json.loads(arguments).items())


def _glm(arguments: str) -> str:
    return "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in json.loads(arguments).items())


@pytest.mark.parametrize("kind", list(ToolFormat))
def test_streamed_and_whole_are_equal_and_arguments_arrive_as_written(kind: str) -> None:
    for seed in range(ANSWERS):
        rng = random.Random(f"{kind} {seed}")
        written = Written(rng, kind)
        if kind == "pythonic" and written.calls:
            written.said = ""  # a list of calls is the whole answer
        text = written.text
        whole = heard(of(kind), text)
        calls: list[Call] = written.calls
        thought, said, found = whole
        assert (thought, said.strip(), found) == (written.thought, written.said, calls), (seed, text)
        cuts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 30))]
        assert heard(of(kind), text, cuts) == whole, (seed, text)
        assert heard(of(kind), text, list(range(len(text)))) == whole, (seed, text)
        end = rng.randrange(len(text) + 1)  # an answer cut off by max_tokens
        assert heard(of(kind), text[:end], cuts, cut=True) == heard(of(kind), text[:end], cut=True), (seed, text)


@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "mistral", "deepseek_v3", "openai"])
def test_forty_kilobytes_of_arguments_begin_to_stream_within_three_tokens(kind: str) -> None:
    """A token here is four characters."""
    written = Written(random.Random(1), kind)
    arguments = json.dumps({"path": "a.py", "text": "line of code\n" * 3200})
    assert len(arguments) > 40 << 10
    written.thought, written.said, written.calls = "", "", [("write", arguments)]
    text, parser, streamed, late = written.text, AnswerParser(of(kind)), "", None
    begin = text.index(arguments)
    most_pending = 0
    for first in range(0, len(text), 4):
        for event in parser.feed(text[first : first + 4]):
            if isinstance(event, Arguments):
                late = (first + 4 - begin) / 4 if late is None else late
                streamed += event.text
            assert isinstance(event, (Arguments, CallBegin)) or streamed == arguments
        if begin < first < begin + len(arguments):
            most_pending = max(most_pending, first + 4 - begin - len(streamed))
    assert streamed == arguments
    assert late is not None
    assert late <= 3
    assert most_pending <= 3 * 4
