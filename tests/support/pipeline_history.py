"""Long histories of a cluster of cores, drawn from a seed and reduced to a hash. Also a program that a test runs in a
new process.
"""

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable

from ballast.common.cost import CostModel
from ballast.common.ids import RequestId
from ballast.common.sampling import PriorityClass
from ballast.common.targets import for_all
from services.worker.core.events import AdmissionLimited, Execute, PrefillLimited, Removed
from services.worker.policy.harvest import Harvest
from services.worker.policy.lookahead import lookahead
from services.worker.policy.microbatching import by_token_count
from tests.support.pipeline_parts import LAYERS, Group, Request
from tests.support.pipelines import Cluster
from tests.support.worker_core import VOCAB_SIZE, greedy, limits, undisturbed

# Cost models that split prompts finely, hardly at all, and in between.
_COSTS = (CostModel(0.2, 1.0, 0.0, 0.0), CostModel(0.01, 1.0, 20.0, 20.0), CostModel(0.05, 1.0, 2.0, 0.5, 0.05))
_STOPS = ("bcbc", "aba", "babab", "ca aab", "é", "aab ca")


class History:
    def __init__(self, seed: int, requests: int = 40, events: int = 1_000) -> None:
        rng = self.rng = random.Random(seed)
        cost = rng.choice(_COSTS)
        max_running_count = rng.randrange(1, 6)
        swap_blocks, swap_per_step = random.Random(-seed).choice([(0, 0), (10, 1), (60, 2), (60, 0)])
        self.cluster = Cluster(
            limits(
                block_tokens=rng.choice([1, 3, 4]),
                max_model_len=40,
                max_running_count=max_running_count,
                max_batch_tokens=max_running_count + rng.randrange(16),
                max_waiting_count=rng.randrange(1, 8),
                max_waiting_tokens=120,
                admission_reserve_fraction=rng.choice([0.0, 0.1]),
                swap_block_count=swap_blocks,
                prefix_caching=seed % 3 > 0,
                swap_blocks_per_step=swap_per_step,
                swaps_online=random.Random(seed + 1).random() < 0.5,
            ),
            [LAYERS * rng.randrange(12, 44) for _ in range(rng.randrange(2, 5))],
            by_token_count if rng.random() < 0.3 else lookahead(lambda: None if rng.random() < 0.05 else cost),
            self._harvest(seed, cost),
        )
        self.left = requests
        self.events = events
        self.counts: Counter[str] = Counter()

    @staticmethod
    def _harvest(seed: int, cost: CostModel) -> Harvest | None:
        if random.Random(seed + 2).random() >= 0.5:
            return None
        targets = for_all(random.Random(seed + 3).choice([None, 1e-3]))
        return Harvest(lambda: cost, 1.0, targets=targets, layer_count=LAYERS)

    def play(self) -> "History":
        for _ in range(self.events):
            name = self.rng.choices(_NAMES, _WEIGHTS)[0]
            if _ACTIONS[name][1](self):
                self.counts[name] += 1
            for request in self.cluster.requests:
                if request.is_open:
                    request.judge(self.cluster.limits.max_model_len)
        self.cluster.run_to_end()
        for request in self.cluster.requests:
            request.judge(self.cluster.limits.max_model_len)
        self.cluster.assert_empty()
        return self

    @property
    def returned_from_mirrors(self) -> int:
        """Number of blocks copied back from host memory for offline sequences that had yielded; 0 if online sequences
        swap, too.
        """
        if self.cluster.limits.swaps_online:
            return 0
        told = [command for command in self.cluster.told if isinstance(command, Execute | Removed)]
        return sum(not copy.out for command in told for copy in command.copies)

    # Each action returns whether it could do anything.

    def submit(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        rng, cluster = self.rng, self.cluster
        serial = len(cluster.requests)
        request = Request(
            RequestId(f"r{serial}"),
            self._prompt(),
            greedy(
                rng.randrange(3, 30),
                min_tokens=rng.randrange(3),
                stop=tuple(rng.sample(_STOPS, rng.randrange(3))) if rng.random() < 0.4 else (),
                include_stop=rng.random() < 0.5,
                ignore_eos=rng.random() < 0.5,
                logprobs=rng.choice([None, None, 0]),
            ),
            rng.random() < 0.7,
            rng.choice(list(PriorityClass)),
            cluster.at_s + rng.random() * 5 if rng.random() < 0.1 else None,
        )
        cluster.submit(request, rng.choice(cluster.workers))
        return True

    def _prompt(self) -> tuple[int, ...]:
        """A random prompt. With prefix caching, it often begins with a prefix of an earlier request's prompt and
        answer.
        """
        rng, cluster = self.rng, self.cluster
        new = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, rng.choice([6, 24]))))
        if not (cluster.limits.prefix_caching and cluster.requests) or rng.random() < 0.3:
            return new
        before = rng.choice(cluster.requests)
        answer = undisturbed(before.prompt, before.sampling, cluster.limits.max_model_len).token_ids
        said = (*before.prompt, *answer)
        return (*said[: rng.randrange(1, len(said) + 1)][:24], *new[:4])

    def want_batch(self) -> bool:
        return self.cluster.want_batch(self._group())

    def run_stage(self, *, preempted: bool = False) -> bool:
        ready = [w for w in self.cluster.workers if w.queue]
        if ready:
            self.cluster.run_stage(self.rng.choice(ready), preempted=preempted)
        return bool(ready)

    def preempt(self) -> bool:
        return self.run_stage(preempted=True)

    def finish_step(self, *, fail: bool = False) -> bool:
        ready = [g for g in self.cluster.groups if g.results]
        if ready:
            self.cluster.finish_step(self.rng.choice(ready), fail=fail)
        return bool(ready)

    def fail_step(self) -> bool:
        return self.finish_step(fail=True)

    def step(self) -> bool:
        """A whole step of a group without interruption."""
        group = self._group()
        self.cluster.want_batch(group)
        self.cluster.drain_pipeline(group)
        return True

    def read_letter(self) -> bool:
        ready = [w for w in self.cluster.workers if w.letters]
        if ready:
            self.cluster.read_letter(self.rng.choice(ready))
        return bool(ready)

    def follow(self) -> bool:
        request = self._request(lambda r: r.at is None)
        if request is None:
            return False
        self.counts["claims"] += request.claim_at is not None
        self.cluster.follow(request, self.rng.choice(self.cluster.workers))
        return True

    def forget(self) -> bool:
        """The request's dispatcher is lost, so that its handed-over sequence is never claimed."""
        request = self._request(lambda r: r.claim_at is not None)
        if request is not None:
            request.abandoned = True
        return request is not None

    def roll_back(self) -> bool:
        request = self._request(lambda r: r.at is None)
        if request is not None:
            request.roll_back(self.rng.choice(request.past))
        return request is not None

    def abort(self) -> bool:
        request = self._request(lambda _: True)
        if request is not None:
            self.cluster.abort(request)
        return request is not None

    def lose_stream(self) -> bool:
        open_ones = [w for w in self.cluster.workers if w.stream_id]
        if open_ones:
            self.cluster.lose_stream(self.rng.choice(open_ones))
        return bool(open_ones)

    def pass_time(self) -> bool:
        self.cluster.pass_time(self.rng.random() * self.rng.choice([0.1, 0.1, 3.0]))
        return True

    def merge(self) -> bool:
        rng, cluster = self.rng, self.cluster
        groups = rng.sample(cluster.groups, min(len(cluster.groups), rng.randrange(2, 5)))
        members = sum(len(g.members) for g in groups)
        if len(groups) < 2 or members > LAYERS:
            return False
        cluster.merge(groups, sorted(rng.sample(range(1, LAYERS), members - 1)))
        return True

    def split(self) -> bool:
        pipelines = [g for g in self.cluster.groups if len(g.members) > 1]
        if pipelines:
            self.cluster.split(self.rng.choice(pipelines))
        return bool(pipelines)

    def deliver_handover(self) -> bool:
        ready = [g for g in self.cluster.groups if g.handovers]
        if ready:
            group = self.rng.choice(ready)
            self.rng.shuffle(group.handovers)
            self.cluster.deliver_handover(group)
        return bool(ready)

    def carry(self) -> bool:
        ready = [(g, *t) for g in self.cluster.groups for t in self.cluster.travelling(g)]
        if ready:
            self.cluster.carry(*self.rng.choice(ready))
        return bool(ready)

    def lose_kv(self) -> bool:
        ready = [(g, s) for g in self.cluster.groups for s in g.leader.core.group_scheduler.suspended_ids]
        if ready:
            self.cluster.lose_kv(*self.rng.choice(ready))
        return bool(ready)

    def limit_admission(self) -> bool:
        group = self._group()
        limit = self.rng.choice([None, None, self.rng.randrange(1, 30)])
        self.cluster.feed(group.leader, AdmissionLimited(0.0, limit))
        return True

    def limit_prefill(self) -> bool:
        limit = self.rng.choice([None, None, self.rng.randrange(1, 20)])
        self.cluster.feed(self._group().leader, PrefillLimited(0.0, limit))
        return True

    def squeeze(self) -> bool:
        """Reduces a group's capacity for a while."""
        group = self._group()
        self.cluster.tell_capacity(group, missing=self.rng.randrange(1, 20))
        return True

    def relax(self) -> bool:
        self.cluster.tell_capacity(self._group())
        return True

    def shrink(self) -> bool:
        return self.cluster.shrink(self.rng.choice(self.cluster.workers))

    def _group(self) -> Group:
        return self.rng.choice(self.cluster.groups)

    def _request(self, suits: Callable[[Request], bool]) -> Request | None:
        found = [r for r in self.cluster.requests if r.is_open and suits(r)]
        return self.rng.choice(found) if found else None


_ACTIONS = {
    "submit": (12, History.submit),
    "want_batch": (45, History.want_batch),
    "run_stage": (70, History.run_stage),
    "preempt": (10, History.preempt),
    "finish_step": (40, History.finish_step),
    "step": (8, History.step),
    "fail_step": (0.5, History.fail_step),
    "read_letter": (15, History.read_letter),
    "follow": (8, History.follow),
    "forget": (0.4, History.forget),
    "roll_back": (0.6, History.roll_back),
    "abort": (0.7, History.abort),
    "lose_stream": (0.4, History.lose_stream),
    "pass_time": (3, History.pass_time),
    "merge": (3, History.merge),
    "split": (1.5, History.split),
    "deliver_handover": (6, History.deliver_handover),
    "carry": (25, History.carry),
    "lose_kv": (0.6, History.lose_kv),
    "limit_admission": (0.8, History.limit_admission),
    "limit_prefill": (0.8, History.limit_prefill),
    "squeeze": (0.6, History.squeeze),
    "relax": (2, History.relax),
    "shrink": (2, History.shrink),
}
_NAMES = list(_ACTIONS)
_WEIGHTS = [weight for weight, _ in _ACTIONS.values()]


def tell(seed: int) -> str:
    history = History(seed).play()
    told = hashlib.sha256(repr(history.cluster.told).encode()).hexdigest()
    return f"{told} {history.cluster.resumed_from_kv} resumed {sorted(history.counts.items())}"


if __name__ == "__main__":
    print(tell(int(sys.argv[1])))
