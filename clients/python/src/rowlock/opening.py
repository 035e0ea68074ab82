"""Opening a connection: which failures are an outage, and which would repeat."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import Error, Outage, Unavailable
from .protocol import PATIENCE

T = TypeVar("T")

#: What others see of a connection.
NAME = "rowlock"
NOT_READ = (
    "the URL is not one that can be read: special characters of its user and its password are "
    "written as %XX, as by urllib.parse.quote(password, safe='')"
)

PROGRAM = (ImportError, TypeError, ValueError, AttributeError, NameError, LookupError)
#: Of MySQL and MariaDB: no right to the database, no login, no such database, not from this host.
MYSQL = {1044, 1045, 1049, 1130, 1251, 1698}
#: libpq has no SQLSTATE of a connection that failed, and SQLite no other name of it in Python 3.10.
TEXTS = (
    "password authentication failed", "no password supplied", "does not exist",
    "no pg_hba.conf entry", "unable to open database file",
)  # fmt: skip


def opened(connect: Callable[[], T]) -> T:
    """Opens a connection. A failure is an :class:`Outage`."""
    try:
        return connect()
    except Error:
        raise
    except Exception as error:
        raise Outage(sent=False, permanent=is_permanent(error)) from error


class Opening:
    """Opens the connections of a session, on threads of its own.

    What takes longer than a try goes on, and the next try waits for it too. What an application
    passes may wait for a silent server without a limit: after a while another one is begun beside
    it, and the first connection counts.
    """

    def __init__(self, connect: Callable[[float], Any]) -> None:
        self._connect = connect
        self._threads: list[threading.Thread] = []
        self._begun = 0.0
        self._outcomes: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def connection(self, patience: float) -> Any:
        """Returns a connection. Raises :class:`TimeoutError` if there is none in time."""
        patience = max(2.0, patience)  # As libpq, which waits for two seconds at least.
        until = time.monotonic() + patience
        is_begun = self._is_due()
        if is_begun:
            self._begin(patience)
        while True:
            try:
                left = max(0.0, until - time.monotonic())
                connection, error = self._outcomes.get(timeout=left)
            except queue.Empty:
                raise TimeoutError(f"no connection in {patience:.1f} s") from None
            if error is None:
                self.leave()
                return connection
            if is_begun:
                raise error
            is_begun = True  # What an earlier try began has failed.
            self._begin(patience)

    def leave(self) -> None:
        """Ends the wait for what is being opened: it is closed when it comes."""
        outcomes, self._outcomes = self._outcomes, queue.SimpleQueue()
        self._threads.clear()
        _close(outcomes)

    def _is_due(self) -> bool:
        """Returns whether another one is to be begun: ever later, so that few are left."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if not self._threads:
            return self._outcomes.empty()
        pause = PATIENCE * (1 << len(self._threads) - 1)
        return time.monotonic() >= self._begun + pause

    def _begin(self, patience: float) -> None:
        outcomes = self._outcomes

        def work() -> None:
            try:
                outcomes.put((self._connect(patience), None))
            except Exception as error:
                outcomes.put((None, error))
            except BaseException as error:  # It is to end no thread that waits for this one.
                outcomes.put((None, RuntimeError(repr(error))))
            if self._outcomes is not outcomes:
                _close(outcomes)

        self._begun = time.monotonic()
        thread = threading.Thread(target=work, name="rowlock opening", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # As at the end of the process.
            work()
        else:
            self._threads.append(thread)


def _close(outcomes: queue.SimpleQueue[tuple[Any, Exception | None]]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            connection, _ = outcomes.get_nowait()
            with contextlib.suppress(Exception):  # There may be none.
                connection.close()


def is_permanent(error: Exception) -> bool:
    """Returns whether the next try to connect would fail in the same way."""
    code = error.args[0] if error.args else None
    text = str(error)
    return isinstance(error, PROGRAM) or code in MYSQL or any(known in text for known in TEXTS)


def is_of_driver(error: Exception) -> bool:
    """Returns whether an error is one of a driver or of the network, and not of the program."""
    names = [base.__module__.split(".")[0] for base in type(error).__mro__]
    drivers = ("psycopg", "pymysql", "MySQLdb", "sqlite3")
    return isinstance(error, (OSError, EOFError)) or any(name in drivers for name in names)


def missing(name: str, package: str) -> Unavailable:
    """Returns the error of a driver that is not installed."""
    error = Unavailable(f"the driver {name} is not installed: pip install {package}")
    error.permanent = True
    return error
