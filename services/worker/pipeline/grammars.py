"""Grammars of requests, compiled by who will follow them before their sequences come.

Compiling takes up to seconds, and in the engine's thread every batch of the last stage would wait for it. The leader
compiles as well, to check them, before it takes the request in: most of the time the last stage is done by then. If it
is not, it waits for what is under way; what it was not told of it compiles when it comes.
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
    from services.worker.pipeline.role import Role

_MOST_WAITING = 32
# Begins to compile one, in a thread beside all others; what is compiled already is remembered.
CompileGrammar: TypeAlias = Callable[[Grammar], Future[Any]]  # Any: of what the engine keeps


class GrammarsAhead:
    """Grammars that one member compiles ahead."""

    def __init__(self, role: Role, links: Links, compile_grammar: CompileGrammar) -> None:
        self._role = role
        self._links = links
        self._compile = compile_grammar
        self._told: OrderedDict[Grammar, None] = OrderedDict()  # those that the last stage knows, oldest first
        self._told_in = Epoch(0)
        self._waiting: list[Future[Any]] = []

    def comes(self, grammar: Grammar) -> None:
        """A request with it is about to be taken in by this leader, or by that of this last stage."""
        role = self._role
        if not role.stages:
            return  # who submits it here compiles it here
        if role.is_last:
            self._compile_beside(grammar)
        elif role.leads:
            self._tell(grammar)

    def _compile_beside(self, grammar: Grammar) -> None:
        """What is wrong with it the leader says."""
        self._waiting = [job for job in self._waiting if not job.done()]
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(self._compile(grammar))

    def _tell(self, grammar: Grammar) -> None:
        """Once: the last stage keeps as many."""
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
