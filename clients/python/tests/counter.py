"""A counter for each key, in the database: its write depends on the claim, and on nothing else.

The number is read before the transaction that writes the next one. So two processes that both
believe they hold the key write the same number, unless one of them fails to confirm its claim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEYS = ("a", "b")
#: Contention, which ends a transaction that is then repeated: a SQLSTATE, and codes of MySQL.
REPEATED = ("40001", 1205, 1213, 1020)
TABLES = (
    "CREATE TABLE counter (name VARCHAR(10) PRIMARY KEY, n BIGINT NOT NULL)",
    "CREATE TABLE written (name VARCHAR(10), n BIGINT, token BIGINT, who VARCHAR(10))",
    "INSERT INTO counter VALUES ('a', 0), ('b', 0)",
)


def reads(key: str) -> str:
    return f"SELECT n FROM counter WHERE name = '{key}'"


def writes(key: str, token: int, number: int, who: str) -> tuple[str, str]:
    return (
        f"UPDATE counter SET n = {number} WHERE name = '{key}'",
        f"INSERT INTO written VALUES ('{key}', {number}, {token}, '{who}')",
    )


def read(connection: Any, key: str) -> int:
    cursor = connection.cursor()
    cursor.execute(reads(key))
    number = int(cursor.fetchone()[0])
    connection.commit()
    return number


def write(connection: Any, confirm: Callable[[Any], None], statements: tuple[str, ...]) -> None:
    """Sends the statements in a transaction that confirms the claim first."""
    while True:
        cursor = connection.cursor()
        try:
            confirm(cursor)
            for statement in statements:
                cursor.execute(statement)
            connection.commit()
            return
        except Exception as error:
            connection.rollback()
            code = getattr(error, "sqlstate", None) or (error.args or (None,))[0]
            if code not in REPEATED:
                raise
