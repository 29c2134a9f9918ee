"""The planner's view of the state server, and its one operation in flight (pure).

Every write is a compare-and-set on the epoch last read, with the fencing token of the lease. With any answer the
planner converges to the stored state: a conflict or an unknown outcome leads to a new read, a lost lease to standby
(I5). The epoch of a write with unknown outcome counts as used.
"""

from dataclasses import dataclass

from ballast.common.ids import Epoch
from services.planner.core import messages as p


@dataclass(slots=True)
class StoreSync:
    verify_interval_s: float
    retry_s: float  # wait before the next attempt if the state server does not answer
    token: int | None = None  # fencing token of the lease; None: standby
    writing: p.Write | None = None
    reading: bool = False
    is_read: bool = False  # True: the stored state is known well enough for writing
    read_at_s: float = 0.0  # time of the next read
    journal_at_s: float = 0.0  # earliest time of the next journal write
    stored_epoch: Epoch | None = None  # epoch last read or written; None: nothing is stored
    used_epoch: int = 0  # highest epoch that may have been written
    has_seen_last: bool = True  # True: this planner knows every epoch that was written

    @property
    def busy(self) -> bool:
        return self.reading or self.writing is not None

    def next_epoch(self, newest: Epoch) -> Epoch:
        """Return an unused epoch. `newest`: the highest epoch of a layout known to this planner."""
        next_epoch = max(newest, self.used_epoch, self.stored_epoch or 0) + 1
        # A token is a time of the state server's clock in milliseconds, and plans are made less than once a second.
        clock = (self.token or 0) // 1000
        return Epoch(next_epoch if self.has_seen_last else max(next_epoch, clock))

    def use(self, epoch: int) -> None:
        """Record an epoch that was used or reported."""
        self.used_epoch = max(self.used_epoch, epoch)

    def lead(self, token: int | None, at_s: float) -> None:
        """Adopt a changed lease, and schedule a read of the stored state."""
        self.token, self.has_seen_last = token, self.has_seen_last and token is not None
        self._abandon_write()
        self.is_read, self.read_at_s = False, at_s

    def read(self) -> p.LoadLayout:
        self.reading = True
        return p.LoadLayout()

    def write(self, command: p.Write) -> p.Write:
        self.writing = command
        return command

    def load_failed(self, at_s: float) -> None:
        self.reading, self.read_at_s = False, at_s + self.retry_s

    def loaded(self, stored: p.StoredLayout | None, newest: Epoch, at_s: float) -> None:
        self.reading, self.is_read, self.read_at_s = False, True, at_s + self.verify_interval_s
        self.stored_epoch = stored.layout.epoch if stored is not None else None
        if stored is not None and stored.journal is not None:
            self.use(stored.journal.epoch)
        if self.token is not None and stored is not None and stored.layout.epoch >= newest:
            self.has_seen_last = True  # a standby may miss epochs that the leader writes

    def settled(self, event: p.WriteSettled) -> bool:
        """Handle the result of a write. Returns False if it is outdated: its lease has ended."""
        if self.writing is None or event.write != self.writing:
            return False
        is_journal = isinstance(event.write, p.WriteJournal)
        match event.outcome:
            case p.WriteOutcome.WRITTEN:
                pass
            case p.WriteOutcome.CONFLICT:
                self.is_read, self.read_at_s = False, event.at_s
            case p.WriteOutcome.UNAVAILABLE | p.WriteOutcome.FENCED if is_journal:
                # After FENCED, the owner of the lease reports the loss or the new token, and then the stored state is
                # read.
                self.journal_at_s = event.at_s + self.retry_s
            case p.WriteOutcome.UNAVAILABLE:
                self._abandon_write()
                self.is_read, self.read_at_s = False, event.at_s + self.retry_s
            case p.WriteOutcome.FENCED:
                self.is_read, self.read_at_s = False, event.at_s + self.retry_s
        self.writing = None
        return True

    def stored(self, epoch: Epoch, at_s: float) -> None:
        """Record that a layout of this planner was stored."""
        self.stored_epoch, self.read_at_s, self.has_seen_last = epoch, at_s + self.verify_interval_s, True

    def _abandon_write(self) -> None:
        """Drop a write whose outcome remains unknown. Its epoch counts as used."""
        if isinstance(self.writing, p.WriteLayout):
            self.use(self.writing.layout.epoch)
        self.writing = None
