"""Collects the output of one event, per dispatcher."""

from collections.abc import Callable, Iterable, Sequence

from ballast.common.sampling import FinishReason
from services.worker.core.batch import TokenLogprobs
from services.worker.core.events import Emit, Ending, SequenceKey
from services.worker.core.sequence import Sequence as Running

_MANY_MARKS = 64  # this many marks (16,384 tokens) are sent without waiting for other output


class _Letter:
    # fmt: off
    __slots__ = (
        "endings", "handles", "has_text", "logprobs", "preempted", "resumed", "texts", "token_counts", "token_ids"
    )
    # fmt: on

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.token_counts: list[int] = []
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.has_text = False
        self.logprobs: list[TokenLogprobs] = []
        self.endings: list[Ending] = []
        self.preempted: tuple[int, ...] = ()
        self.resumed: tuple[int, ...] = ()


class Outbox:
    def __init__(self) -> None:
        self._letters: dict[int, _Letter] = {}  # stream id -> its pending output
        self._marks: dict[int, list[int]] = {}  # stream id -> marks for its next output; sent alone at `_MANY_MARKS`

    def _letter(self, stream_id: int) -> _Letter:
        letter = self._letters.get(stream_id)
        if letter is None:
            letter = self._letters[stream_id] = _Letter()
        return letter

    def token(self, sequence: Running, token_id: int, text: str, logprobs: TokenLogprobs | None) -> None:
        stream_id, handle = sequence.key
        letter = self._letters.get(stream_id) or self._letter(stream_id)
        letter.handles.append(handle)
        letter.token_counts.append(1)
        letter.token_ids.append(token_id)
        if text and sequence.wants_text:
            letter.texts.append(text)
            letter.has_text = True
        else:
            letter.texts.append("")
        if logprobs is not None:
            letter.logprobs.append(logprobs)

    def tokens(self, stream_id: int, handles: list[int], token_ids: list[int]) -> None:
        """Add one token without text for each handle."""
        letter = self._letters.get(stream_id) or self._letter(stream_id)
        letter.handles += handles
        letter.token_counts += [1] * len(handles)
        letter.token_ids += token_ids
        letter.texts += [""] * len(handles)

    def text(self, sequence: Running, text: str) -> None:
        """Add text without a new token. It was held back because it could have begun a stop string."""
        if sequence.wants_text and text:
            letter = self._letter(sequence.key[0])
            letter.handles.append(sequence.key[1])
            letter.token_counts.append(0)
            letter.texts.append(text)
            letter.has_text = True

    def turned(self, key: SequenceKey, *, waits: bool) -> None:
        """Report a sequence as preempted, or as admitted again."""
        letter = self._letter(key.stream_id)
        if waits:
            letter.preempted = (*letter.preempted, key.handle)
        else:
            letter.resumed = (*letter.resumed, key.handle)

    def moved(self, key: SequenceKey, to: str, cached_token_count: int = 0) -> None:
        """Report that the request continues under another leader."""
        ending = Ending(key.handle, None, moved_to=to, cached_token_count=cached_token_count)
        self._letter(key.stream_id).endings.append(ending)

    def ended(self, sequence: Running, reason: FinishReason, error: str, invalid: bool) -> None:
        stream_id, handle = sequence.key
        cached, matched_stop = sequence.cached_tokens or 0, sequence.stop.matched_stop
        ending = Ending(handle, reason, matched_stop, error, invalid=invalid, cached_token_count=cached)
        self._letter(stream_id).endings.append(ending)

    def record_refused(self, key: SequenceKey, why: str, invalid: bool) -> None:
        """Report a request that never became a sequence: refused, or ERROR if the request itself is at fault
        (`invalid`).
        """
        reason = FinishReason.ERROR if invalid else None
        self._letter(key.stream_id).endings.append(
            Ending(key.handle, reason, error=why, refused=not invalid, invalid=invalid)
        )

    def marks(self, stream_ids: Iterable[int], marks: Sequence[int]) -> None:
        for stream_id in stream_ids:
            self._marks.setdefault(stream_id, []).extend(marks)
            if len(self._marks[stream_id]) >= _MANY_MARKS:
                self._letter(stream_id)

    def close(self, stream_id: int) -> None:
        self._marks.pop(stream_id, None)

    def take(self, seen_handle: Callable[[int], int]) -> list[Emit]:
        """Take an Emit for each stream with pending output. `seen_handle(stream_id)`: highest handle received on it."""
        if not self._letters:
            return []
        letters, self._letters = self._letters, {}
        return [
            Emit(
                stream_id,
                tuple(letter.handles),
                tuple(letter.token_counts),
                tuple(letter.token_ids),
                tuple(letter.texts) if letter.has_text else (),
                tuple(letter.logprobs),
                tuple(letter.endings),
                seen_handle(stream_id),
                letter.preempted,
                letter.resumed,
                tuple(self._marks.pop(stream_id, ())) if self._marks else (),
            )
            for stream_id, letter in letters.items()
        ]
