"""Opening a connection: which failures are an outage, and which would repeat."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import Error, Outage, Unavailable
from .result import Result

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


def within(seconds: float, connect: Callable[[], T]) -> T:
    """Opens a connection on a thread of its own, which is left if it takes longer.

    What an application passes may wait for a silent server without a limit.
    """
    result: Result[T] = Result()
    decision = threading.Lock()  # Taken by what comes first: the connection, or the limit.

    def work() -> None:
        connection: Any = None
        error: BaseException | None = None
        try:
            connection = connect()
        except BaseException as problem:
            error = problem
        if decision.acquire(blocking=False):
            result.deliver(connection, error)
        else:
            with contextlib.suppress(Exception):
                connection.close()

    try:
        threading.Thread(target=work, name="rowlock opening", daemon=True).start()
    except RuntimeError:  # As at the end of the process.
        return connect()
    try:
        return result.result(seconds)
    except TimeoutError:
        if decision.acquire(blocking=False):
            raise TimeoutError(f"no connection in {seconds:.1f} s") from None
        return result.result()  # It came in this moment, or had a limit of its own.


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
