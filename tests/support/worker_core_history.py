"""A long, fixed history of a worker's core, reduced to a hash of all its commands. A test runs it as a program."""

import hashlib
import random
import sys

from ballast.common.sampling import PriorityClass
from services.worker.core.events import Aborted, Command, StreamClosed, Tick
from tests.support.worker_core import VOCAB_SIZE, Driver, greedy, limits


class _Told(Driver):
    digest = hashlib.sha256()

    def feed(self, event: object) -> list[Command]:
        commands = super().feed(event)  # pyright: ignore[reportArgumentType]
        for command in commands:
            self.digest.update(repr(command).encode())
        return commands


def tell(seed: int) -> str:
    rng = random.Random(seed)
    driver = _Told(limits(max_running_count=8, max_batch_tokens=24, max_waiting_count=12), 24)
    open_streams: set[int] = set()
    for _ in range(1_500):
        stream_id = rng.randrange(1, 5)
        if stream_id not in open_streams:
            driver.open(stream_id)
            open_streams.add(stream_id)
        choice = rng.random()
        if choice < 0.25:
            driver.submit(
                tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12))),
                greedy(rng.randrange(3, 40), stop=("aba",) if rng.random() < 0.3 else ()),
                stream_id=stream_id,
                priority=rng.choice(list(PriorityClass)),
                deadline_at_s=driver.at_s + rng.random() * 0.2 if rng.random() < 0.3 else None,
            )
        elif choice < 0.28 and driver.received:
            driver.feed(Aborted(driver.at_s, rng.choice(list(driver.received))))
        elif choice < 0.285:
            driver.feed(StreamClosed(driver.at_s, stream_id))
            open_streams.discard(stream_id)
        elif choice < 0.3:
            driver.feed(Tick(driver.at_s))
        elif driver.pending is None:
            driver.want_batch()
        else:
            driver.finish_step()
    driver.run_to_end()
    driver.assert_empty()
    totals = driver.core.totals
    return f"{driver.digest.hexdigest()} {totals.steps} steps, {totals.preemptions} preemptions, {totals.endings}"


if __name__ == "__main__":
    print(tell(int(sys.argv[1])))
