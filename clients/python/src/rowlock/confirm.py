"""The confirmation of a claim in a transaction of the application's own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from .connect import driver_of
from .errors import Error, Lost
from .functions import MYSQL_CHANGES, POSTGRES_CHANGES, change_values
from .protocol import Claim
from .sqlite import change_statement, parameters

_IN_TRANSACTION = 1  # the flag SERVER_STATUS_IN_TRANS of MySQL's protocol


def confirm_statement(cursor: Any, claim: Claim) -> tuple[str, Any]:
    """Returns the statement for the cursor's driver, and its values."""
    driver = driver_of(cursor)
    if not hasattr(cursor, "fetchone"):
        raise TypeError("a confirmation takes a cursor, not a connection: connection.cursor()")
    if driver == "sqlite3":
        return change_statement("confirm"), parameters(claim)
    changes = POSTGRES_CHANGES if driver == "psycopg" else MYSQL_CHANGES
    return changes["confirm"], change_values(claim)


@contextmanager
def confirmed(cursor: Any, claim: Claim) -> Generator[Callable[[Any], None], None, None]:
    """Turns the database's answer into a loss, and refuses to confirm outside a transaction."""
    driver = driver_of(cursor)
    lost = Lost(claim.key, claim.token, "a transaction was to confirm it")

    def read(row: Any) -> None:
        if driver == "sqlite3" and row is None:
            raise lost

    try:
        yield read
    except Exception as error:
        if getattr(error, "sqlstate", None) == "RL001" or "is lost: roll" in str(error):
            raise lost from error
        raise
    if not _in_transaction(driver, cursor.connection):
        raise Error("a confirmation needs a transaction: this connection commits each statement")


def _in_transaction(driver: str, connection: Any) -> bool:
    if driver == "sqlite3":
        return bool(connection.in_transaction)
    if driver == "psycopg":
        return bool(connection.info.transaction_status)
    # mysqlclient does not tell.
    return driver != "pymysql" or bool(connection.server_status & _IN_TRANSACTION)
