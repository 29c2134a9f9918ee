"""Timed workers that hand requests over to one another, as workers do when groups form and dissolve.

The dispatcher submits the request to its new worker, and the old worker sends the notice of the handover. The request
resumes once both have arrived.
"""

import asyncio

from ballastpb.worker.v1 import worker_pb2 as pb
from tests.support.timed_worker import TimedSettings, TimedStream, TimedWorker


class TimedMember(TimedWorker):
    def __init__(self, settings: TimedSettings, port: int = 0) -> None:
        super().__init__(settings, port)
        self.leads = True
        self.hold_s = 10.0  # how long a submitted request waits for its notice
        self.resumed_count = 0
        self.refused_count = 0
        self._handed_over: set[str] = set()  # requests with a notice, whose submission has not arrived
        self._waiting: dict[str, tuple[TimedStream, pb.Submit]] = {}

    def hand_over(self, to: "TimedMember", names: set[str] | None = None, *, tell_s: float = 0.0) -> int:
        """Hands over all requests, or those named, to `to`, which is notified after `tell_s` seconds. Returns their
        number.
        """
        count = 0
        for sequence in [*self.running, *self.waiting]:
            submit = sequence.submit
            if names is not None and submit.request_id not in names:
                continue
            count += 1
            ending = pb.Ending(handle=submit.handle, moved_to=to.settings.worker_id)
            sequence.stream.output.endings.append(ending)
            self.forget(sequence)
            asyncio.get_running_loop().call_later(tell_s, to.adopt, submit.request_id)
        return count

    def adopt(self, request_id: str) -> None:
        self._handed_over.add(request_id)
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            self._resume(*waiting)

    def submit(self, stream: TimedStream, submit: pb.Submit) -> None:
        if not self.leads:
            self.refused_count += 1
            self.refuse(stream, submit)
        elif submit.request_id in self._handed_over:
            self._resume(stream, submit)
        elif submit.expects_handover:
            self._waiting[submit.request_id] = stream, submit
            asyncio.get_running_loop().call_later(self.hold_s, self._give_up, submit)
        else:
            super().submit(stream, submit)

    def _give_up(self, submit: pb.Submit) -> None:
        waiting = self._waiting.get(submit.request_id)
        if waiting is not None and waiting[1] is submit:
            del self._waiting[submit.request_id]
            super().submit(*waiting)

    def _resume(self, stream: TimedStream, submit: pb.Submit) -> None:
        self._handed_over.discard(submit.request_id)
        self.resumed_count += 1
        super().submit(stream, submit)
