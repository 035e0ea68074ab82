"""The confirmation of claims in a transaction of the application's own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from . import mysql, postgres
from .errors import Error, Lost
from .protocol import Claim
from .sources import driver_of
from .sqlite import change_statement, parameters

_IN_TRANSACTION = 1  # the flag SERVER_STATUS_IN_TRANS of MySQL's protocol
_NO_SAVEPOINT = 1305  # there is none of this name, or the last statement was committed by itself
_SQLITE = ("sqlite3", "aiosqlite")


def unwrapped(cursor: Any) -> Any:
    """Returns the driver's cursor that a cursor of Django wraps, or the cursor itself."""
    while type(cursor).__module__.startswith("django."):
        inner = getattr(cursor, "cursor", None)
        if inner is None or callable(inner):
            break
        cursor = inner
    return cursor


_DATABASES = {"psycopg": "postgres", "sqlite3": "sqlite", "aiosqlite": "sqlite"}


def confirm_statement(cursor: Any, claim: Claim, database: str | None) -> tuple[str, Any]:
    """Returns the statement for the cursor's driver, and its values."""
    driver = driver_of(cursor)
    if database not in (None, _DATABASES.get(driver, "mysql")):
        raise TypeError(f"the cursor is one of {driver}, and the claim is on {database}")
    if not hasattr(cursor, "fetchone"):
        raise TypeError("a confirmation takes a cursor, not a connection: connection.cursor()")
    if driver in _SQLITE:
        return change_statement("confirm"), parameters(claim)
    statement = postgres.CONFIRM if driver == "psycopg" else mysql.CONFIRM
    return statement, (claim.key, claim.holder, claim.token)


@contextmanager
def confirming(cursor: Any, claim: Claim) -> Generator[None, None, None]:
    """Turns the database's answer into a loss, and refuses to confirm outside a transaction."""
    try:
        yield
    except Exception as error:
        if getattr(error, "sqlstate", None) == "RL001" or "is lost: roll" in str(error):
            raise lost(claim) from error
        raise
    if not _in_transaction(cursor):
        raise Error("a confirmation needs a transaction: this connection commits each statement")


def lost(claim: Claim) -> Lost:
    """Returns the error of a transaction that was to confirm a claim."""
    why = "its row was seen without the claim, which a transaction was to confirm"
    return Lost(claim.key, claim.token, why)


def read(cursor: Any, claim: Claim, row: Any) -> None:
    """Reads the reply of SQLite, which returns the row of a claim that stands."""
    if driver_of(cursor) in _SQLITE and row is None:
        raise lost(claim)


def plain_cursor(cursor: Any) -> Any:
    """Returns a cursor of the same transaction whose rows are tuples, or none."""
    if driver_of(cursor) != "psycopg":
        return cursor
    from psycopg import AsyncConnection, AsyncCursor, Cursor
    from psycopg.rows import tuple_row

    kind: Any = AsyncCursor if isinstance(cursor.connection, AsyncConnection) else Cursor
    return kind(cursor.connection, row_factory=tuple_row)


def connection_of(cursor: Any) -> Any:
    return cursor._conn if driver_of(cursor) == "aiosqlite" else cursor.connection


def _in_transaction(cursor: Any) -> bool:
    driver, connection = driver_of(cursor), connection_of(cursor)
    if driver in _SQLITE:
        return bool(connection.in_transaction)
    if driver == "psycopg":
        return bool(connection.info.transaction_status)
    if driver == "MySQLdb":
        return _keeps_savepoints(cursor)
    if driver in ("aiomysql", "asyncmy"):
        return bool(connection.get_transaction_status())
    return bool(connection.server_status & _IN_TRANSACTION)


def _keeps_savepoints(cursor: Any) -> bool:
    """Asks the server: mysqlclient does not tell what state it is in."""
    cursor.execute("SAVEPOINT rowlock_confirmed")
    try:
        cursor.execute("RELEASE SAVEPOINT rowlock_confirmed")
    except Exception as error:
        if error.args[:1] == (_NO_SAVEPOINT,):
            return False
        raise
    return True
