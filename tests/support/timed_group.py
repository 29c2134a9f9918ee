"""Timed workers that hand requests over to one another, as workers do when groups form and dissolve.

What was handed over goes on being generated; whoever submits it is first sent what it does not have yet.
"""

import asyncio
import dataclasses
from dataclasses import dataclass

from ballastpb.worker.v1 import worker_pb2 as pb
from tests.support.timed_worker import (
    TimedSequence,
    TimedSettings,
    TimedStream,
    TimedWorker,
    scripted_base,
    scripted_logprobs,
    scripted_text,
    scripted_token,
)


@dataclass(eq=False)
class _Orphan:
    sequence: TimedSequence
    sink: TimedStream  # takes what nobody is told yet


class TimedMember(TimedWorker):
    def __init__(self, settings: TimedSettings, port: int = 0) -> None:
        super().__init__(settings, port)
        self.leads = True
        self.hold_s = 10.0  # so long a request that came before its sequence waits for it
        self.claimed_count = 0
        self.refused_count = 0
        self._orphans: dict[str, _Orphan] = {}
        self._held: dict[str, tuple[TimedStream, pb.Submit]] = {}

    def hand_over(self, to: "TimedMember", names: set[str] | None = None, *, tell_s: float = 0.0) -> int:
        """All requests, or those named, go on there; `to` hears of them after `tell_s`."""
        count = 0
        for sequence in [*self.running, *self.waiting]:
            submit = sequence.submit
            if names is not None and submit.request_id not in names:
                continue
            count += 1
            ending = pb.Ending(handle=submit.handle, moved_to=to.settings.worker_id)
            sequence.stream.output.endings.append(ending)
            self.forget(sequence)
            told = dataclasses.replace(sequence, stream=TimedStream())
            asyncio.get_running_loop().call_later(tell_s, to.adopt, told)
        return count

    def adopt(self, sequence: TimedSequence) -> None:
        sequence.stream.sequences[sequence.submit.handle] = sequence
        self.running[sequence] = None
        self._orphans[sequence.submit.request_id] = _Orphan(sequence, sequence.stream)
        held = self._held.pop(sequence.submit.request_id, None)
        if held is not None:
            self._claim(*held)

    def submit(self, stream: TimedStream, submit: pb.Submit) -> None:
        if not self.leads:
            self.refused_count += 1
            self.refuse(stream, submit)
        elif submit.request_id in self._orphans:
            self._claim(stream, submit)
        elif submit.expects_handover:
            self._held[submit.request_id] = stream, submit
            asyncio.get_running_loop().call_later(self.hold_s, self._give_up, submit)
        else:
            super().submit(stream, submit)

    def _give_up(self, submit: pb.Submit) -> None:
        held = self._held.get(submit.request_id)
        if held is not None and held[1] is submit:
            del self._held[submit.request_id]
            super().submit(*held)

    def _claim(self, stream: TimedStream, submit: pb.Submit) -> None:
        """Sends what the dispatcher lacks and goes on behind it. The first difference fails the test."""
        orphan = self._orphans.pop(submit.request_id)
        sequence, ended = orphan.sequence, bool(orphan.sink.output.endings)
        self.claimed_count += 1
        self.submitted.append(submit)
        stream.seen_handle = submit.handle
        base = scripted_base(submit.prompt_token_ids, submit.sampling.seed)
        made = [scripted_token(base, i, self.settings.vocab_size) for i in range(sequence.generated)]
        has_count = len(submit.output_token_ids)
        assert list(submit.output_token_ids) == made[:has_count]
        step = pb.StepOutput(load=self.load(), seen_handle=submit.handle)
        text = "" if submit.omit_text else scripted_text(made if ended else made[:-1])
        assert submit.delivered_text_chars <= len(text)
        step.handles.append(submit.handle)
        step.token_counts.append(len(made) - has_count)
        step.token_ids.extend(made[has_count:])
        step.texts.append(text[submit.delivered_text_chars :])
        if submit.sampling.HasField("logprobs"):
            step.logprobs.extend(scripted_logprobs(t, submit.sampling.logprobs) for t in made[has_count:])
        for ending in orphan.sink.output.endings:
            step.endings.append(pb.Ending(handle=submit.handle, finish_reason=ending.finish_reason))
        stream.messages.put_nowait(pb.AttachResponse(step=step))
        if not ended:
            sequence.stream, sequence.submit = stream, submit
            stream.sequences[submit.handle] = sequence
