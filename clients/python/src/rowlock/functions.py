"""PostgreSQL, MySQL and MariaDB: the lock's functions, called through the application's driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from .errors import Contention, Error, NotInstalled, Outage, Refusal
from .opening import opened
from .protocol import Claim, Granted, Previous, Terms, from_micros

# Times are numbers, in microseconds: psycopg reads the text of times in one DateStyle alone.
POSTGRES_CLAIM = """
SELECT granted, token, previous_token, previous_label, reason, "by",
       (extract(epoch FROM since) * 1000000)::bigint, (extract(epoch FROM until) * 1000000)::bigint,
       extract(epoch FROM retry_after)::float8
FROM rowlock_try_acquire(
    %s, %s * interval '1 second', %s, %s * interval '1 second', %s, %s::uuid)"""
POSTGRES_CHANGES = {
    "renew": "SELECT rowlock_renew(%s, %s::uuid, %s, %s * interval '1 second')",
    "release": "SELECT rowlock_release(%s, %s::uuid, %s, %s)",
    "abandon": "SELECT rowlock_abandon(%s, %s::uuid, %s)",
    "confirm": "SELECT rowlock_confirm(%s, %s::uuid, %s)",
}
POSTGRES_VERSION = "SELECT rowlock_version()"
MYSQL_CLAIM = "CALL rowlock_try_acquire(%s, %s, %s, %s, %s, %s)"
MYSQL_CHANGES = {
    "renew": "CALL rowlock_renew(%s, %s, %s, %s)",
    "release": "CALL rowlock_release(%s, %s, %s, %s)",
    "abandon": "CALL rowlock_abandon(%s, %s, %s)",
    "confirm": "CALL rowlock_confirm(%s, %s, %s)",
}
MYSQL_VERSION = "CALL rowlock_version()"
#: The oldest version of the functions that this client works with.
NEEDED = 20261127
INSTALL = "run `rowlock migrate --functions` once, or the SQL that `python -m rowlock` prints"
#: How often a procedure may be missing in a row: MySQL drops it before it creates the new one.
MISSING = 20
NO_PROCEDURE = 1305
CONTENTION = {1213, 1205, 1020, 3101, 3572}
READ_ONLY = {1290, 1792, 1836}
OUTAGES = {1040, 1047, 1053, 1180, 1203, 1226, 1317, 1927, 1969, 3169, 4031}


def claim_values(terms: Terms, holder: str) -> tuple[Any, ...]:
    return (terms.key, terms.lease, terms.label, terms.min_interval, terms.rules, holder)


def change_values(claim: Claim, *arguments: Any) -> tuple[Any, ...]:
    return (claim.key, claim.holder, claim.token, *arguments)


def check_version(row: Sequence[Any]) -> None:
    """Raises :class:`NotInstalled` if the functions are older than this client needs."""
    if row[0] < NEEDED:
        raise NotInstalled(
            f"the functions are of version {row[0]}, and this client needs {NEEDED}: {INSTALL}"
        )


def read_reply(terms: Terms, holder: str, row: Sequence[Any]) -> Granted | Refusal:
    """Reads the columns of ``POSTGRES_CLAIM``."""
    granted, token, previous_token, previous_label, reason, by, since, until, retry_after = row
    if granted:
        previous = None
        if previous_token is not None:
            previous = Previous(int(previous_token), text(previous_label or ""))
        return Granted(Claim(terms.key, holder, int(token)), previous)
    after = None if retry_after is None else float(retry_after)
    label = None if by is None else text(by)
    return Refusal(terms.key, text(reason), label, _utc(since), _utc(until), after)


def text(value: str | bytes) -> str:
    """Returns the text that a driver has read: psycopg decodes none that may be in any encoding."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _utc(value: datetime | int | None) -> datetime | None:
    return (
        from_micros(value)
        if value is None or isinstance(value, int)
        else value.replace(tzinfo=timezone.utc)
    )


def postgres_meaning(error: Exception) -> Exception:
    """What an error of psycopg means for a request that was sent."""
    state: str | None = getattr(error, "sqlstate", None)
    if state in ("40001", "40P01", "55P03", "57014"):  # The last: a statement_timeout.
        return Contention()
    if state == "25006":  # A standby, or a server before its fail-over has ended.
        return Outage(sent=False)
    if state in ("42883", "42P01", "42703"):
        return NotInstalled(f"{str(error).splitlines()[0]}: {INSTALL}")
    lost = ("25P03", "25P04", "40003", "53300")
    if state is None or state in lost or state.startswith(("08", "57P")):
        return Outage(sent=True)
    return Error(f"the database refused: {error}")


def mysql_meaning(error: Exception) -> Exception:
    """What an error of PyMySQL or mysqlclient means for a request that was sent."""
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    if code in CONTENTION:
        return Contention()
    if code in READ_ONLY:
        return Outage(sent=False)
    if code in (NO_PROCEDURE, 1146, 1054):
        return NotInstalled(f"{error}: {INSTALL}")
    if code in OUTAGES or 2000 <= code < 3000 or code == 0:
        return Outage(sent=True)
    return Error(f"the database refused: {error}")


class FunctionSession:
    """Sends requests over a connection that is opened for the first of them, and kept."""

    def __init__(
        self, connect: Callable[[], Any], claim: str, changes: dict[str, str],
        meaning: Callable[[Exception], Exception], cursor: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self._connect = connect
        self._cursor = cursor
        self._connection: Any = None
        self._claim = claim
        self._changes = changes
        self._meaning = meaning

    def claim(self, terms: Terms, holder: str) -> Granted | Refusal:
        row = self._run(self._claim, claim_values(terms, holder))
        if self._claim is MYSQL_CLAIM:
            row = (*row[:2], *row[4:])  # without the holder and the end of the lease
        return read_reply(terms, holder, row)

    def change(self, change: str, claim: Claim, *arguments: Any) -> str:
        return text(self._run(self._changes[change], change_values(claim, *arguments))[0])

    def _run(self, sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
        if self._connection is None:
            self._connection = opened(self._connect)
            version = MYSQL_VERSION if self._claim is MYSQL_CLAIM else POSTGRES_VERSION
            try:
                check_version(self._run(version, ()))
            except BaseException:
                self.close()
                raise
        left = MISSING
        while True:
            try:
                return self._fetch(sql, values)
            except Exception as error:
                left -= 1
                if error.args[:1] == (NO_PROCEDURE,) and left > 0:
                    time.sleep(0.05)
                    continue
                meant = self._meaning(error)
                if not isinstance(meant, Contention):
                    # The next request may succeed on another one.
                    self.close()
                raise meant from error

    def _fetch(self, sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
        cursor = self._cursor(self._connection)
        try:
            cursor.execute(sql, values)
            row: Sequence[Any] = cursor.fetchone()
            # A procedure has a second result, without rows.
            while cursor.nextset():
                pass
        finally:
            cursor.close()
        return row

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except Exception:
                return  # It is lost; there is nothing left to close.
