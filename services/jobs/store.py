"""Storage in one folder: jobs.sqlite, and clients' files in files/.

A file is written as ID.part, synced and renamed, and then gets a row. Files without a row remain from interrupted
writes and are removed when the folder is opened. A line's result is a column of its row, written once, in one
transaction with the counts of its batch. Every transaction first checks that the folder still belongs to this process
(`epoch`, the fencing token of the lease), so that a process that was presumed dead cannot write when it resumes.

All calls block, so the runner makes them in a thread.
"""

import contextlib
import errno
import json
import os
import sqlite3
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final, cast

from ballast.common.errors import BallastError, NotFound, Unavailable
from services.jobs.core.batch import BatchState, JobBatch, Problem
from services.jobs.core.lines import JobLine

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BUSY_TIMEOUT_S: Final = 5.0
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value REAL NOT NULL);
CREATE TABLE IF NOT EXISTS files (
    serial INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    name TEXT NOT NULL, bytes INTEGER NOT NULL, created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    serial INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, has_ended INTEGER NOT NULL,
    total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL, input_file_id TEXT NOT NULL,
    rest TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS open_batches ON batches (has_ended) WHERE NOT has_ended;
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, is_success INTEGER, result TEXT, PRIMARY KEY (batch_id, number));
"""


class Full(BallastError):
    """The disk is full, and nothing was written."""


class Fenced(BallastError):
    """The folder now belongs to a process with another token."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    owner: str
    purpose: str
    name: str
    bytes: int
    created_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a line. `text`: its line in the output file."""

    batch_id: str
    number: int
    is_success: bool
    text: str


@dataclass(frozen=True, slots=True)
class CallerUsage:
    """Usage of one owner or of all: bytes of files, number of open batches, and number of their lines without a
    result.
    """

    file_bytes: int
    open_batches: int
    open_lines: int


class Store:
    """The jobs and files of a folder, which it takes over when constructed. Only one thread may use it at a time;
    `Upload`s are independent.

    Args:
        folder: The folder, which is created if necessary.
        epoch: Fencing token of this process.
        before_write: Called with a description of each write before it is made; tests make it fail.
        busy_timeout_s: Maximum wait for another process's lock.

    Raises:
        Fenced: a process with a higher token has opened the folder.
        Unavailable: another process, stopped during a write, still holds the lock.
    """

    def __init__(
        self,
        folder: Path,
        epoch: int,
        before_write: Callable[[str], None] = lambda _: None,
        busy_timeout_s: float = _BUSY_TIMEOUT_S,
    ) -> None:
        self._files = folder / "files"
        self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._epoch = epoch
        self._before_write = before_write
        self._db = sqlite3.connect(
            folder / "jobs.sqlite", timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        try:
            with _with_names():
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.executescript(_SCHEMA)
            self._take_over()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    # ------------------------------------------------------------------------------------------ whose it is

    @staticmethod
    def last_epoch(folder: Path) -> int:
        """Return the highest fencing token with which the folder was opened; 0 if it never was."""
        path = folder / "jobs.sqlite"
        if not path.exists():
            return 0
        with contextlib.closing(sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S)) as db:
            try:
                return int(_meta(db, "epoch"))
            except sqlite3.OperationalError:
                return 0  # a process died before it created the tables

    @property
    def last_s(self) -> float:
        """Return the time of the last stored change. A clock that has been set back since must not start before it."""
        return _meta(self._db, "now_s")

    def _take_over(self) -> None:
        """Take the folder over and remove files without a row and rows without a file, in one transaction, so that no
        later process takes over in between.
        """
        with self._transaction("take over", of_ours=False):
            seen = _meta(self._db, "epoch")
            if seen > self._epoch:
                why = f"the folder was taken over by a process with token {seen:.0f}, this one has {self._epoch}"
                raise Fenced(why)
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (self._epoch,))
            rows = {str(row[0]) for row in self._db.execute("SELECT id FROM files")}
            there = {path.name for path in self._files.iterdir()}
            for name in there - rows:
                (self._files / name).unlink(missing_ok=True)
            self._db.executemany("DELETE FROM files WHERE id = ?", [(one,) for one in rows - there])

    @contextlib.contextmanager
    def _transaction(self, what: str, *, of_ours: bool = True, now_s: float | None = None) -> Generator[None]:
        with _with_names():
            self._before_write(what)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                if of_ours and (seen := _meta(self._db, "epoch")) != self._epoch:
                    raise Fenced(f"the folder was taken over by a process with token {seen:.0f}")
                yield
                if now_s is not None:
                    self._db.execute("INSERT OR REPLACE INTO meta VALUES ('now_s', ?)", (now_s,))
                self._before_write(f"commit {what}")
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    # ------------------------------------------------------------------------------------------ files

    def new_file(self, file_id: str, owner: str, purpose: str, name: str, created_s: float) -> "Upload":
        return Upload(self._files, StoredFile(file_id, owner, purpose, name, 0, created_s), self._before_write)

    def add_file(self, file: StoredFile) -> None:
        """Add the row of a file whose contents are in place. If that fails, remove the contents."""
        try:
            with self._transaction("add a file", now_s=file.created_s):
                self._insert_file(file)
        except BaseException:
            self.path(file.id).unlink(missing_ok=True)
            raise

    def _insert_file(self, file: StoredFile) -> None:
        values = (file.id, file.owner, file.purpose, file.name, file.bytes, file.created_s)
        self._db.execute("INSERT INTO files VALUES (NULL, ?, ?, ?, ?, ?, ?)", values)

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Return the file with this id, if it is the owner's.

        Raises:
            NotFound: the owner has no such file.
        """
        found = self._db.execute(f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        if found is None:
            raise NotFound(f"there is no file {file_id}")
        return StoredFile(*found)

    def files(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile]:
        where, values = _page("files", owner, after, newest_first)
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        order = "DESC" if newest_first else "ASC"
        query = f"SELECT {_FILE} FROM files WHERE {where} ORDER BY serial {order} LIMIT ?"
        return [StoredFile(*row) for row in self._db.execute(query, (*values, limit))]

    def path(self, file_id: str) -> Path:
        return self._files / file_id

    def delete_file(self, file_id: str) -> None:
        """Delete a file: first its contents, which needs no disk space, then its row. If the disk is full, the row is
        deleted when the folder is next opened.
        """
        self._before_write("delete a file")
        self.path(file_id).unlink(missing_ok=True)
        with contextlib.suppress(Full), self._transaction("forget a file"):
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def is_in_use(self, file_id: str) -> bool:
        query = "SELECT 1 FROM batches WHERE NOT has_ended AND input_file_id = ?"
        return self._db.execute(query, (file_id,)).fetchone() is not None

    def outdated_files(self, before_s: float) -> list[str]:
        query = """SELECT id FROM files WHERE created_s < ? AND NOT EXISTS
                   (SELECT 1 FROM batches WHERE NOT has_ended AND input_file_id = files.id)"""
        return [str(row[0]) for row in self._db.execute(query, (before_s,))]

    def usage(self, owner: str | None = None) -> CallerUsage:
        """Return the usage of one owner; None: of all owners together."""
        mine, values = ("owner = ?", (owner,)) if owner is not None else ("1", ())
        stored = self._db.execute(f"SELECT coalesce(sum(bytes), 0) FROM files WHERE {mine}", values).fetchone()[0]
        query = f"""SELECT count(*), coalesce(sum(total - completed - failed), 0) FROM batches
                    WHERE NOT has_ended AND {mine}"""
        batches, lines = self._db.execute(query, values).fetchone()
        return CallerUsage(int(stored), int(batches), int(lines))

    # ------------------------------------------------------------------------------------------ batches

    def add_batch(self, batch: JobBatch) -> None:
        with self._transaction("add a batch", now_s=batch.created_s):
            self._db.execute(
                "INSERT INTO batches VALUES (NULL, ?, ?, 0, 0, 0, 0, ?, ?)",
                (batch.id, batch.owner, batch.input_file_id, _rest_of(batch)),
            )

    def save_batch(self, batch: JobBatch, now_s: float, lines: Sequence[JobLine] = ()) -> None:
        """Store the state of a batch. `lines`: all its lines, if they have just been validated."""
        with self._transaction("save a batch", now_s=now_s):
            self._update(batch)
            rows = ((batch.id, line.number, line.custom_id, line.offset, line.length) for line in lines)
            self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, NULL, NULL)", rows)

    def end_batch(self, batch: JobBatch, now_s: float, files: Sequence[StoredFile]) -> None:
        """Store an ended batch and the rows of its output files, and delete its lines."""
        with self._transaction("end a batch", now_s=now_s):
            for file in files:
                self._insert_file(file)
            self._update(batch)
            self._db.execute("DELETE FROM lines WHERE batch_id = ?", (batch.id,))

    def _update(self, batch: JobBatch) -> None:
        self._db.execute(
            "UPDATE batches SET has_ended = ?, total = ?, rest = ? WHERE id = ?",
            (batch.has_ended, batch.total, _rest_of(batch), batch.id),
        )

    def batch(self, batch_id: str, owner: str) -> JobBatch:
        """Return the batch with this id, if it is the owner's.

        Raises:
            NotFound: the owner has no such batch.
        """
        found = self._db.execute(f"SELECT {_BATCH} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner))
        row = found.fetchone()
        if row is None:
            raise NotFound(f"there is no batch {batch_id}")
        return _batch_of(row)

    def batches(self, owner: str, *, after: str | None, limit: int) -> list[JobBatch]:
        """Return up to `limit` batches of an owner, newest first, that follow the batch `after`."""
        where, values = _page("batches", owner, after, newest_first=True)
        query = f"SELECT {_BATCH} FROM batches WHERE {where} ORDER BY serial DESC LIMIT ?"
        return [_batch_of(row) for row in self._db.execute(query, (*values, limit))]

    def open_batches(self) -> list[JobBatch]:
        query = f"SELECT {_BATCH} FROM batches WHERE NOT has_ended ORDER BY serial"
        return [_batch_of(row) for row in self._db.execute(query)]

    def forget_batches(self, before_s: float) -> None:
        """Delete the batches that ended before `before_s`."""
        ended_s = "coalesce((SELECT max(value) FROM json_each(rest, '$.at_s')), json_extract(rest, '$.created_s'))"
        with self._transaction("forget batches"):
            query = f"DELETE FROM batches WHERE has_ended AND {ended_s} < ?"
            self._db.execute(query, (before_s,))

    # ------------------------------------------------------------------------------------------ lines

    def open_lines(self, batch_id: str, after: int, limit: int) -> list[JobLine]:
        """Return the next `limit` lines of a batch without a result after line number `after`, in order."""
        query = """SELECT number, custom_id, offset, length FROM lines
                   WHERE batch_id = ? AND number > ? AND result IS NULL ORDER BY number LIMIT ?"""
        return [JobLine(*row) for row in self._db.execute(query, (batch_id, after, limit))]

    def save_results(self, results: Sequence[Result], now_s: float) -> dict[str, tuple[int, int]]:
        """Store the results of lines that have none yet. Returns the numbers of stored results: batch -> (successes,
        failures).
        """
        stored: dict[str, tuple[int, int]] = {}
        with self._transaction("save results", now_s=now_s):
            for one in results:
                made = self._db.execute(
                    "UPDATE lines SET is_success = ?, result = ? WHERE batch_id = ? AND number = ? AND result IS NULL",
                    (one.is_success, one.text, one.batch_id, one.number),
                )
                good, bad = stored.get(one.batch_id, (0, 0))
                is_good = one.is_success and made.rowcount == 1
                stored[one.batch_id] = (good + is_good, bad + (made.rowcount == 1 and not one.is_success))
            self._db.executemany(
                "UPDATE batches SET completed = completed + ?, failed = failed + ? WHERE id = ?",
                [(good, bad, batch_id) for batch_id, (good, bad) in stored.items()],
            )
        return stored

    def results(self, batch_id: str, after: int, limit: int) -> list[tuple[int, str, bool, str | None]]:
        """Return the next `limit` lines of a batch after number `after`, in order, as (number, custom id, success,
        result or None).
        """
        query = """SELECT number, custom_id, coalesce(is_success, 0), result FROM lines
                   WHERE batch_id = ? AND number > ? ORDER BY number LIMIT ?"""
        rows = self._db.execute(query, (batch_id, after, limit))
        return [(row[0], row[1], bool(row[2]), row[3]) for row in rows]


class Upload:
    """A file that is being written, until `commit` renames it or `abort` removes it."""

    def __init__(self, folder: Path, file: StoredFile, before_write: Callable[[str], None]) -> None:
        self._folder = folder
        self._file = file
        self._before_write = before_write
        self._part = folder / f"{file.id}.part"
        self._open: IO[bytes] | None = None
        self.bytes = 0

    def write(self, data: bytes) -> None:
        with _with_names():
            self._before_write("write to a file")
            if self._open is None:
                self._open = open(self._part, "wb")  # noqa: SIM115 - closed by commit or abort
            self._open.write(data)
            self.bytes += len(data)

    def commit(self) -> StoredFile:
        """Sync the file and rename it to its final name. Its row is added by `Store.add_file` or `end_batch`."""
        self.write(b"")
        assert self._open is not None, "write() has opened it"
        with _with_names():
            self._open.flush()
            self._before_write("sync a file")
            os.fsync(self._open.fileno())
            self._open.close()
            self._before_write("rename a file")
            self._part.rename(self._folder / self._file.id)
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        file = self._file
        return StoredFile(file.id, file.owner, file.purpose, file.name, self.bytes, file.created_s)

    def abort(self) -> None:
        """Remove the file, even after `commit`."""
        if self._open is not None:
            with contextlib.suppress(OSError):  # flushing may fail on a full disk
                self._open.close()
        for path in (self._part, self._folder / self._file.id):
            path.unlink(missing_ok=True)


_FILE: Final = "id, owner, purpose, name, bytes, created_s"
_BATCH: Final = "rest, total, completed, failed"


def _page(table: str, owner: str, after: str | None, newest_first: bool) -> tuple[str, list[object]]:
    """Return the SQL condition, with its values, for an owner's rows that follow the row with the id `after`."""
    if after is None:
        return "owner = ?", [owner]
    compare = "<" if newest_first else ">"
    return f"owner = ? AND serial {compare} (SELECT serial FROM {table} WHERE id = ?)", [owner, after]


def _rest_of(batch: JobBatch) -> str:
    fields = asdict(batch)
    for counted in ("total", "completed", "failed"):
        del fields[counted]
    return json.dumps(fields)


def _batch_of(row: tuple[str, int, int, int]) -> JobBatch:
    fields = json.loads(row[0])
    fields["state"], fields["outcome"] = BatchState(fields["state"]), BatchState(fields["outcome"])
    fields["at_s"] = {BatchState(state): at_s for state, at_s in fields["at_s"].items()}
    fields["problems"] = tuple(Problem(**one) for one in fields["problems"])
    return JobBatch(**fields, total=row[1], completed=row[2], failed=row[3])


def _meta(db: sqlite3.Connection, name: str) -> float:
    row = cast(tuple[float] | None, db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone())
    return 0.0 if row is None else row[0]


@contextlib.contextmanager
def _with_names() -> Generator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        match error.sqlite_errorcode & 0xFF, error.sqlite_errorcode:
            case (sqlite3.SQLITE_FULL, _) | (_, sqlite3.SQLITE_IOERR_WRITE):
                raise Full(f"no room for the jobs: {error}") from error
            case (sqlite3.SQLITE_BUSY, _):
                why = "another process writes to the folder and does not finish"
                raise Unavailable("jobs", why) from error
            case _:
                raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise Full(f"no room for the jobs: {error.strerror}") from error
