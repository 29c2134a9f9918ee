"""Faults of lines, links, monitors and planners in a simulation; `sim.faults` has those of workers."""

import math
from functools import partial

from sim.links import SILENCE_S
from sim.monitoring import MonitorNode
from sim.planning import PlannerNode
from sim.process import Process
from sim.world import World


class Troubles:
    def __init__(self, world: World) -> None:
        self._world = world
        self._clock = world.clock
        self._cuts: dict[tuple[str, str], int] = {}  # line -> number of cuts

    # ------------------------------------------------------------ lines

    def cut(self, source: str, to: str, for_s: float) -> None:
        """Cut a line. No effect if it is already cut."""
        lines, line = self._world.lines, (source, to)
        if lines.is_cut(source, to):
            return
        number = self._cuts[line] = self._cuts.get(line, 0) + 1
        lines.cut(source, to)
        if for_s < math.inf:
            self._clock.after(for_s, b"line is whole", partial(self._mend, source, to))
        self._clock.after(SILENCE_S, b"silence", partial(self._silent, source, to, number))

    def _mend(self, source: str, to: str) -> None:
        self._world.lines.mend(source, to)
        planes = self._world.planes
        for me, peer in ((source, to), (to, source)):
            if (plane := planes.get(me)) is not None and peer in planes:
                plane.try_again(peer)

    def _silent(self, source: str, to: str, number: int) -> None:
        plane = self._world.planes.get(to)
        if self._world.lines.is_cut(source, to) and self._cuts[source, to] == number and plane is not None:
            plane.drop_silent(source)

    def slow(self, source: str, to: str, late_s: float, for_s: float) -> None:
        self._world.lines.slow(source, to, late_s)
        self._clock.after(for_s, b"line is fast", lambda: self._world.lines.slow(source, to, 0.0))

    def reset(self, one: str, other: str) -> None:
        """Break the connection between two workers."""
        self._world.planes[one].reset(other)

    # ------------------------------------------------------------ monitors and planners

    def stop(self, node: MonitorNode | PlannerNode, for_s: float) -> None:
        process: Process = node.process
        if not (process.crashed or process.paused):
            process.stop()
            self._clock.after(for_s, b"process goes on", process.go_on)

    def replace(self, node: MonitorNode | PlannerNode, after_s: float) -> None:
        """End the process of a node, and start another one after a delay."""
        if node.process.crashed:
            return
        node.process.crash()
        start = self._world.add_monitor if isinstance(node, MonitorNode) else self._world.add_planner
        self._clock.after(after_s, b"process starts", start)
