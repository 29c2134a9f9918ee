"""A simulated process of the control plane, which can be paused or crash."""

from collections.abc import Callable

from ballast.common.ids import Epoch

Act = Callable[[], None]


class Process:
    """A process. While it is stopped nothing happens; messages and timers are handled when it continues."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.crashed = False
        self.paused = False
        self._owed: list[Act] = []
        self._due: dict[str, Act] = {}

    def run(self, act: Act) -> None:
        if self.crashed:
            return
        if self.paused:
            self._owed.append(act)
        else:
            act()

    def run_due(self, what: str, act: Act) -> None:
        """`run` for periodic work: several missed calls become one."""
        if self.paused and not self.crashed:
            self._due[what] = act
        else:
            self.run(act)

    def stop(self) -> None:
        self.paused = True

    def go_on(self) -> None:
        if not self.paused:
            return
        self.paused = False
        due, self._due = self._due, {}
        owed, self._owed = self._owed, []
        for act in (*due.values(), *owed):
            self.run(act)

    def crash(self) -> None:
        self.crashed = True
        self._owed.clear()
        self._due.clear()


class SimTimer:
    def __init__(self, act: Callable[[Epoch], None], epoch: Epoch) -> None:
        self._act: Callable[[Epoch], None] | None = act
        self._epoch = epoch

    def cancel(self) -> None:
        self._act = None

    def ring(self) -> None:
        if self._act is not None:
            self._act(self._epoch)
