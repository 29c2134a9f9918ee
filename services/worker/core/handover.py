"""Sequences as they are told to their next leader, and back; and whether a request is the one that was told about."""

from ballast.common.sampling import PriorityClass
from services.worker.core.events import Submitted
from services.worker.core.intake import with_seed
from services.worker.core.limits import WorkerLimits
from services.worker.core.sequence import NOBODY, Sequence, SequenceState, Unsent
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.stop import StopRule, StopText

_CLASSES = tuple(PriorityClass)  # in order of rank


def pack(sequence: Sequence, at_s: float, *, suspended: bool) -> SequenceSnapshot:
    """The sequence as it is at `at_s`. `suspended`: its KV is on its way."""
    stop, unsent = sequence.stop, sequence.unsent
    text = stop.text
    skip_chars, passed_chars = (text.skip_chars, text.passed_chars) if text else (0, 0)
    return SequenceSnapshot(
        sequence_id=sequence.sequence_id,
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        priority=_CLASSES[sequence.rank],
        age_s=at_s - sequence.arrival[0],
        deadline_s=None if sequence.deadline_at_s is None else sequence.deadline_at_s - at_s,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=tuple(sequence.output_token_ids),
        sampling=sequence.sampling,
        wants_text=sequence.wants_text,
        computed_tokens=sequence.computed_tokens if sequence.on_stages else 0,  # an orphan that has ended has none
        on_stages=sequence.on_stages,
        suspended=suspended,
        gone=unsent is None and sequence.state is SequenceState.ENDED,
        held_text=text.held if text else "",
        skip_chars=skip_chars,
        passed_chars=passed_chars,
        emitted_token_count=unsent.token_count if unsent else len(sequence.output_token_ids),
        emitted_chars=unsent.char_count if unsent else passed_chars + skip_chars,
        unsent_text="".join(unsent.texts) if unsent else "",
        unsent_logprobs=tuple(unsent.logprobs) if unsent else (),
        finish_reason=unsent.finish_reason if unsent else None,
        matched_stop=stop.matched_stop,
        error=unsent.error if unsent else "",
        invalid=unsent is not None and unsent.invalid,
    )


def unpack(snapshot: SequenceSnapshot, at_s: float, limits: WorkerLimits) -> Sequence:
    """An orphan: waiting, or ended if it had ended."""
    submitted = Submitted(
        at_s=at_s - snapshot.age_s,
        key=NOBODY,
        request_id=snapshot.request_id,
        attempt=snapshot.attempt,
        prompt_token_ids=snapshot.prompt_token_ids,
        sampling=snapshot.sampling,
        output_token_ids=snapshot.output_token_ids,
        priority=snapshot.priority,
        deadline_at_s=None if snapshot.deadline_s is None else at_s + snapshot.deadline_s,
        wants_text=snapshot.wants_text,
    )
    text = (snapshot.held_text, snapshot.skip_chars, snapshot.passed_chars)
    sequence = Sequence(snapshot.sequence_id, submitted, stop_rule(submitted, limits, text))
    sequence.computed_tokens = snapshot.computed_tokens
    sequence.on_stages = snapshot.on_stages
    sequence.may_overfill = True
    if snapshot.output_token_ids:
        sequence.first_token_at_s = at_s
    sequence.note(at_s, f"handed over: {sequence.token_count} tokens, {sequence.computed_tokens} with KV")
    if snapshot.gone:
        sequence.move(SequenceState.ENDED, at_s, "had ended, its KV travels")
        return sequence
    unsent = sequence.unsent = Unsent(snapshot.emitted_token_count, snapshot.emitted_chars)
    unsent.add(snapshot.unsent_text)
    unsent.logprobs.extend(snapshot.unsent_logprobs)
    if snapshot.finish_reason is not None:
        sequence.stop.matched_stop = snapshot.matched_stop
        unsent.finish_reason, unsent.error, unsent.invalid = snapshot.finish_reason, snapshot.error, snapshot.invalid
        sequence.move(SequenceState.ENDED, at_s, f"had ended: {snapshot.finish_reason.value}")
    return sequence


def stop_rule(submitted: Submitted, limits: WorkerLimits, text: tuple[str, int, int]) -> StopRule:
    """`text`: what is held back, the characters not to be passed on, and those that have gone through before."""
    sampling = submitted.sampling
    room = limits.max_model_len - len(submitted.prompt_token_ids)
    matcher = None
    if submitted.wants_text or sampling.stop:
        matcher = StopText(sampling.stop, sampling.include_stop_str_in_output, *text)
    return StopRule(sampling, limits.eos_token_ids, min(sampling.max_tokens, room), matcher)


def disagreement(orphan: Sequence, claim: Submitted) -> str:
    """Why `claim` is not for `orphan`, or cannot be answered from what was kept of it; empty if it is and can."""
    unsent = orphan.unsent
    assert unsent is not None
    output, claimed = orphan.output_token_ids, claim.output_token_ids
    if claim.prompt_token_ids != orphan.prompt_token_ids or with_seed(claim.sampling) != orphan.sampling:
        return "the dispatcher submits another request"
    if list(claimed) != output[: len(claimed)]:
        return "the dispatcher has other tokens"
    if claim.wants_text and not orphan.wants_text:
        return "the dispatcher wants text, and none was kept"
    if len(claimed) < unsent.token_count and (claim.wants_text or orphan.sampling.logprobs is not None):
        return f"the dispatcher lacks {unsent.token_count - len(claimed)} tokens that were sent, with their text"
    if claim.wants_text:
        end_chars = unsent.char_count + sum(map(len, unsent.texts))
        if not unsent.char_count <= claim.delivered_text_chars <= end_chars:
            return (
                f"the dispatcher has {claim.delivered_text_chars} characters, those from {unsent.char_count} to"
                f" {end_chars} were kept"
            )
    return ""
