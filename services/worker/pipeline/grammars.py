"""Compiles grammars of requests in advance, on the stage that samples.

Compilation takes up to seconds and would block every batch in the last stage's engine thread. The leader compiles the
grammar, too, in order to validate it before accepting the request; by then the last stage has usually finished. If not,
the last stage waits for its compilation. A grammar that was not announced is compiled when the request arrives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

from ballast.common.ids import Epoch
from ballast.common.sampling import Grammar
from ballast.service.grammar import MOST_KEPT
from services.worker.links.traffic import TrafficClass
from services.worker.pipeline.wire import Topic, grammar_to_bytes

if TYPE_CHECKING:
    from services.worker.pipeline.links import Links
    from services.worker.pipeline.role import MemberRole

_MOST_WAITING = 32
# Starts compiling a grammar in a separate thread, or returns the cached result.
CompileGrammar: TypeAlias = Callable[[Grammar], Future[Any]]  # Any: the engine's compiled form


class GrammarsAhead:
    """Grammars that one member compiles in advance."""

    def __init__(self, role: MemberRole, links: Links, compile_grammar: CompileGrammar) -> None:
        self._role = role
        self._links = links
        self._compile = compile_grammar
        self._told: OrderedDict[Grammar, None] = OrderedDict()  # announced to the last stage, oldest first
        self._told_in = Epoch(0)
        self._waiting: list[Future[Any]] = []

    def comes(self, grammar: Grammar) -> None:
        """Compile, or announce to the last stage, the grammar of a request that this worker or its leader accepts."""
        role = self._role
        if not role.stages:
            return  # a worker that serves alone compiles when the request is submitted
        if role.is_last:
            self._compile_in_background(grammar)
        elif role.leads:
            self._tell(grammar)

    def _compile_in_background(self, grammar: Grammar) -> None:
        """Start to compile a grammar, unless many are being compiled. Errors are reported by the leader."""
        self._waiting = [job for job in self._waiting if not job.done()]
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(self._compile(grammar))

    def _tell(self, grammar: Grammar) -> None:
        """Announce a grammar to the last stage, unless that stage has it in its cache, which holds as many as are noted
        here.
        """
        role, told = self._role, self._told
        if self._told_in != role.epoch:
            self._told_in = role.epoch
            told.clear()
        is_known = grammar in told
        told[grammar] = None
        told.move_to_end(grammar)
        if len(told) > MOST_KEPT:
            told.popitem(last=False)
        if not is_known:
            last = role.stages[-1].worker_id
            self._links.send(last, TrafficClass.CONTROL, Topic.GRAMMAR, grammar_to_bytes(grammar))
