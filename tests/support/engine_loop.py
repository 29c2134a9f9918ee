"""A worker without threads and sockets: the real core and the real engine, called as the shell's engine thread does.

Time is virtual. The books of the core and of device memory are checked after every step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from tokenizers import Tokenizer

from ballast.common.ids import RequestId
from ballast.common.load import LoadReport
from ballast.common.sampling import PriorityClass, SamplingParams
from services.worker.core import events as w
from services.worker.core.batch import Batch, NewSequence, SequenceId, StepResult, TokenLogprobs
from services.worker.core.limits import WorkerLimits
from services.worker.core.worker import WorkerCore
from services.worker.engine.load import Engine
from services.worker.memory.host_blocks import HostBlocks
from services.worker.text import Detokenizer, primed_detokenizer

_STREAM_ID = 1
_STEP_S = 0.001


@dataclass
class Answer:
    """What a dispatcher has received for one request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    text_chars: list[int] = field(default_factory=list[int])  # length of the text so far, after each token
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    ending: w.Ending | None = None


class EngineLoop:
    """Runs a worker's core on an engine. A small `block_count` makes KV scarce. The engine outlives this loop; `finish`
    removes everything from it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        block_count: int | None = None,
        max_running_count: int = 64,
        max_batch_tokens: int = 512,
        max_waiting_count: int = 1024,
        swap_block_count: int = 0,
        swap_blocks_per_step: int = 0,
        prefix_caching: bool = False,
    ) -> None:
        self.engine = engine
        self.answers: dict[w.SequenceKey, Answer] = {}
        self._tokenizer = tokenizer
        self._texts: dict[SequenceId, Detokenizer] = {}
        self._events: list[w.Event] = []
        self._handles: Iterator[int] = count(1)
        self._at_s = 0.0
        self.core = WorkerCore(
            WorkerLimits(
                block_tokens=engine.block_tokens,
                max_model_len=engine.info.max_model_len,
                vocab_size=engine.info.vocab_size,
                eos_token_ids=frozenset(engine.info.eos_token_ids),
                adapters=frozenset(adapter.name for adapter in engine.info.adapters),
                max_running_count=max_running_count,
                max_batch_tokens=max_batch_tokens,
                max_waiting_count=max_waiting_count,
                max_waiting_tokens=1 << 20,
                admission_reserve_fraction=0.0,  # the tests need preemption
                swap_block_count=swap_block_count,
                swap_blocks_per_step=swap_blocks_per_step,
                prefix_caching=prefix_caching,
            ),
            block_count or engine.block_count,
        )
        self.core.handle(w.StreamOpened(0.0, _STREAM_ID))
        self._host = HostBlocks(engine.memory.kv, swap_block_count) if swap_block_count else None
        self.copied_blocks = 0

    # ---------------------------------------------------------------- what a dispatcher does

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        output: Sequence[int] = (),
        delivered_chars: int = 0,
        wants_text: bool = True,
        priority: PriorityClass = PriorityClass.DEFAULT,
    ) -> Answer:
        key = w.SequenceKey(_STREAM_ID, next(self._handles))
        prompt, output = tuple(prompt), tuple(output)
        self.answers[key] = answer = Answer(prompt, sampling)
        output_text = ""
        if output and (wants_text or sampling.stop):
            detokenizer = self._detokenizer(NewSequence(0, prompt, (), sampling))
            output_text = "".join(map(detokenizer.push, output))
        self._events.append(
            w.Submitted(
                at_s=self._at_s,
                key=key,
                request_id=RequestId(f"r{key.handle}"),
                attempt=2 if output else 1,
                prompt_token_ids=prompt,
                sampling=sampling,
                output_token_ids=output,
                output_text=output_text,
                delivered_text_chars=delivered_chars,
                wants_text=wants_text,
                priority=priority,
            )
        )
        return answer

    def abort(self, answer: Answer) -> None:
        key = next(key for key, other in self.answers.items() if other is answer)
        self._events.append(w.Aborted(self._at_s, key))

    # ---------------------------------------------------------------- what the engine thread does

    def turn(self) -> bool:
        """Processes pending events and runs one step. Returns whether the core had work."""
        self._at_s += _STEP_S
        events, self._events = self._events, []
        for event in (*events, w.Tick(self._at_s)):
            self._obey(self.core.handle(event))
        stepping = self.core.has_work
        if stepping:
            self._obey(self.core.handle(w.BatchWanted(self._at_s)))
        self.core.check()
        self.engine.check()
        return stepping

    def run(self, before_turn: Callable[[], bool] = lambda: False, max_turns: int = 100_000) -> None:
        """Runs turns until there is no work left and `before_turn` submits nothing more."""
        for _ in range(max_turns):
            more = before_turn()
            if not self.turn() and not more and not self._events:
                return
        raise AssertionError(f"work left after {max_turns} turns")

    def finish(self) -> None:
        """Checks that every request has ended and no block is held, and removes all sequences from the engine."""
        assert all(answer.ending is not None for answer in self.answers.values())
        load = self.load()
        held = (load.used_block_count, load.waiting_block_count, load.running_count, load.waiting_count)
        assert held == (0, 0, 0, 0)
        if self._host is not None:
            self._host.close()
        self.engine.step(Batch(0, self.engine.runner.sequence_ids, (), ()), ())
        assert self.engine.runner.sequence_ids == ()

    def load(self) -> LoadReport:
        return self.core.load(self._at_s, self.engine.memory_report())

    def _detokenizer(self, new: NewSequence) -> Detokenizer:
        return primed_detokenizer(self._tokenizer, new)

    def _obey(self, commands: Sequence[w.Command]) -> None:
        for command in commands:
            match command:
                case w.Execute():
                    self._execute(command)
                case w.Emit():
                    self._receive(command)
                case w.Removed():
                    self._drop_texts(command.batch)
                    self._step(command, ())
                case _:
                    raise AssertionError(f"unexpected: {command}")

    def _execute(self, execute: w.Execute) -> None:
        batch = execute.batch
        self._drop_texts(batch)
        for new, wanted in zip(batch.added, execute.text_wanted, strict=True):
            if wanted:
                self._texts[new.sequence_id] = self._detokenizer(new)
        result = self._step(execute, execute.block_tables)
        sampling = [part.sequence_id for part in batch.slices if part.samples]
        texts = tuple(
            self._texts[sequence_id].push(token_id) if sequence_id in self._texts else ""
            for sequence_id, token_id in zip(sampling, result.token_ids, strict=True)
        )
        self._obey(self.core.handle(w.StepDone(self._at_s, result, texts)))

    def _step(self, command: w.Execute | w.Removed, tables: Sequence[Sequence[int]]) -> StepResult:
        if not command.copies:
            return self.engine.step(command.batch, tables)
        assert self._host is not None
        self.copied_blocks += sum(len(copy.device_blocks) for copy in command.copies)
        self._host.start(command.copies, self.engine.memory.kv.held_layers)
        result = self.engine.step(command.batch, tables)
        return replace(result, copy_s=self._host.finish())

    def _drop_texts(self, batch: Batch) -> None:
        for sequence_id in batch.removed:
            self._texts.pop(sequence_id, None)

    def _receive(self, emit: w.Emit) -> None:
        tokens, logprobs = iter(emit.token_ids), iter(emit.logprobs)
        for index, handle in enumerate(emit.handles):
            answer = self.answers[w.SequenceKey(emit.stream_id, handle)]
            assert answer.ending is None, f"request {handle} gets tokens after its end"
            for _ in range(emit.token_counts[index]):
                answer.token_ids.append(next(tokens))
                if answer.sampling.logprobs is not None:
                    answer.logprobs.append(next(logprobs))
                    assert answer.logprobs[-1].token_id == answer.token_ids[-1]
            answer.text += emit.texts[index] if emit.texts else ""
            answer.text_chars += [len(answer.text)] * emit.token_counts[index]
        assert next(tokens, None) is None
        assert next(logprobs, None) is None
        for ending in emit.endings:
            answer = self.answers[w.SequenceKey(emit.stream_id, ending.handle)]
            assert answer.ending is None, f"request {ending.handle} ends twice"
            answer.ending = ending
