"""PostgreSQL, MySQL and MariaDB: what sessions that call the lock's functions have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from .errors import Contention, NotInstalled, Outage, Refusal, from_micros
from .listener import Listener
from .opening import Opening, opened
from .protocol import PATIENCE, Change, Claim, Granted, Previous, Range, Seen
from .terms import Terms

#: The oldest version of the functions that this client works with.
NEEDED = 20261202
INSTALL = "run `rowlock migrate --functions` once, or the SQL that `python -m rowlock` prints"
#: How often a procedure may be missing in a row: MySQL drops it before it creates the new one.
MISSING = 20
#: The error of MySQL and MariaDB for a procedure that does not exist.
NO_PROCEDURE = 1305
#: The requests of a waiter for its ticket.
TICKETS = ("join", "front", "stay", "leave", "clear")


def text(value: str | bytes) -> str:
    """Returns the text that a driver has read: psycopg decodes none that may be in any encoding."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def read_reply(terms: Terms, holder: str, row: Sequence[Any]) -> Granted | Refusal:
    """Reads the columns of ``CLAIM`` of ``postgres.py``."""
    granted, token, previous_token, previous_label, reason, by, since, until, retry_after = row
    if granted:
        previous = None
        if previous_token is not None:
            previous = Previous(int(previous_token), text(previous_label or ""))
        return Granted(Claim(terms.key, holder, int(token)), previous)
    after = None if retry_after is None else float(retry_after)
    label = None if by is None else text(by)
    return Refusal(terms.key, text(reason), label, _utc(since), _utc(until), after)


def read_row(row: Sequence[Any]) -> Seen:
    """Reads the columns of a look."""
    key, state, token, holder, label, until, left = row
    shown = None if holder is None else text(holder).replace("-", "")
    left = None if left is None else float(left)
    return Seen(text(key), text(state), int(token or 0), shown, text(label or ""), until, left)


def _utc(value: datetime | int | None) -> datetime | None:
    return (
        from_micros(value)
        if value is None or isinstance(value, int)
        else value.replace(tzinfo=timezone.utc)
    )


class FunctionSession(ABC):
    """Calls the functions over a connection that is opened for the first request, and kept."""

    patience = PATIENCE
    listener: Listener | None = None
    version: str

    def __init__(self, connect: Callable[[float], Any]) -> None:
        self._opening = Opening(connect)
        self._connection: Any = None

    def send(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        """Sends requests of one kind, and returns their replies."""
        if kind == "claim":
            return self._claims(requests)
        if kind == "claim all":
            return self._each(lambda request: self._claim_all(*request), requests)
        if kind == "look":
            return [self._look(keys) for keys in requests]
        if kind == "open":
            return [self._run(self.version) for _ in requests]
        if kind == "await":
            return self._await(requests)
        if kind in TICKETS:
            return [self._queue(kind, values) for values in requests]
        return self._changes(kind, requests)

    @abstractmethod
    def _claims(self, requests: Sequence[tuple[Terms, str]]) -> list[Granted | Refusal]: ...
    @abstractmethod
    def _changes(self, kind: str, changes: Sequence[Change]) -> list[str]: ...
    @abstractmethod
    def _look(self, keys: Range) -> list[Seen]: ...
    @abstractmethod
    def _queue(self, kind: str, values: Sequence[Any]) -> Any: ...
    @abstractmethod
    def _begin(self) -> None: ...
    @abstractmethod
    def _end(self, how: str) -> None: ...
    @abstractmethod
    def _cursor(self, connection: Any) -> Any:
        """Returns a plain cursor. Its waits for replies have the limit of now."""

    @abstractmethod
    def _meaning(self, error: Exception) -> Exception: ...

    def _await(self, keys: Sequence[str]) -> list[bool]:
        return [False] * len(keys)

    def _claim_all(self, asked: Sequence[Terms], holder: str) -> list[Granted] | Refusal:
        """Claims all keys in one transaction, or none."""
        self._begin()
        granted: list[Granted] = []
        for terms in asked:
            (reply,) = self._claims([(terms, holder)])
            if isinstance(reply, Refusal):
                self._end("ROLLBACK")
                return reply
            granted.append(reply)
        self._end("COMMIT")
        return granted

    def _each(self, do: Callable[[Any], Any], requests: Sequence[Any]) -> list[Any]:
        """Does it for each request, with a commit for each: those before one that fails stand."""
        replies: list[Any] = []
        for request in requests:
            try:
                replies.append(do(request))
            except Outage as outage:
                sent = outage.sent or bool(replies)
                raise Outage(sent, outage.permanent) from outage.__cause__
        return replies

    def _run(self, sql: str, values: Sequence[Any] = ()) -> Sequence[Sequence[Any]]:
        if self._connection is None:
            self._connection = opened(lambda: self._opening.connection(self.patience))
            try:
                self._check(self._run(self.version)[0])
            except BaseException as error:
                self.close()
                if isinstance(error, Outage):  # The request itself was not sent.
                    raise Outage(sent=False) from error.__cause__
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
                if not isinstance(meant, Contention) or not self._rolled_back():
                    # The next request may succeed on another one.
                    self.close()
                raise meant from error

    def _rolled_back(self) -> bool:
        """Ends the transaction that a failed statement may have left open."""
        try:
            self._end("ROLLBACK")
        except Exception:
            return False
        return True

    def _check(self, row: Sequence[Any]) -> None:
        if row[0] < NEEDED:
            raise NotInstalled(
                f"the functions are of version {row[0]}, and this client needs {NEEDED}: {INSTALL}"
            )

    def _fetch(self, sql: str, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        cursor = self._cursor(self._connection)
        try:
            cursor.execute(sql, values or None)
            rows: Sequence[Sequence[Any]] = cursor.fetchall() if cursor.description else ()
            # A procedure has a second result, without rows.
            while cursor.nextset():
                pass
        finally:
            cursor.close()
        return rows

    def close(self) -> None:
        self._opening.leave()
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except Exception:
                return  # It is lost; there is nothing left to close.
