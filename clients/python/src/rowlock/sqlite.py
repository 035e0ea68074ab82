"""SQLite: the crate's own statements, on a connection of the library's own."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from .errors import Contention, Error, NotInstalled, Overload, Refusal, from_micros
from .functions import read_row
from .opening import opened
from .protocol import BUSY, PATIENCE, Change, Claim, Granted, Previous, Range, Seen
from .rules import Row, Verdict, judge
from .terms import Terms
from .tickets import ALIVE, FRONT

# The clock of the crate's statements, which has milliseconds, in the words of older versions too.
NOW = "(strftime('%s', 'now') * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER) * 1000)"


def _micros(column: str) -> str:
    """A time of the column in microseconds. Other programs keep their times as text."""
    return (
        f"CASE typeof({column}) WHEN 'text' THEN coalesce(strftime('%s', {column}) * 1000000"
        f" + CAST(substr(strftime('%f', {column}), 4) AS INTEGER) * 1000, {column})"
        f" ELSE {column} END"
    )


def _kept(column: str, micros: str) -> str:
    """Microseconds in the form in which the column keeps a time."""
    return (
        f"(SELECT CASE WHEN type LIKE '%INT%' THEN {micros} ELSE strftime('%Y-%m-%d %H:%M:%S', "
        f"({micros}) / 1000000, 'unixepoch') END FROM pragma_table_info('t_resource_lock') "
        f"WHERE name = '{column}' COLLATE NOCASE)"
    )


# What is wrong with the table, by the rules of src/store/sqlite/schema.rs.
WRONG = """
SELECT CASE
    WHEN name = 'key_resource' AND NOT EXISTS (
        SELECT 1 FROM pragma_index_list('t_resource_lock', 'main') i
        WHERE i."unique" AND NOT i.partial AND (
            SELECT group_concat(lower(k.name)) FROM pragma_index_info(i.name, 'main') k
        ) = 'key_resource'
    ) THEN 'is not unique by itself; delete rows with the same key, and make it the primary key'
    WHEN name = 'key_resource' AND NOT is_text THEN '(' || type || ') is not text; use TEXT'
    WHEN name = 'key_resource' AND (
        SELECT replace(upper(sql), 'COLLATE BINARY', '') LIKE '%COLLATE%' FROM main.sqlite_schema
        WHERE lower(name) = 't_resource_lock'
    ) THEN 'has a COLLATE clause and may not compare byte by byte; use TEXT without one'
    WHEN name IN ('begin_time', 'end_time') AND (type LIKE '% NOT NULL' OR NOT (
        is_text OR type LIKE '%INT%' OR type LIKE 'DATETIME%' OR type LIKE 'TIMESTAMP%')
    ) THEN '(' || type || ') does not hold what rowlock writes there; '
        || 'use INTEGER or DATETIME, NULL allowed'
    WHEN name IN ('lock_flag', 'time') AND NOT (
        type LIKE '%INT%' OR type LIKE '%NUM%' OR type LIKE '%BOOL%'
    ) THEN '(' || type || ') does not hold what rowlock writes there; use INTEGER'
    END AS wrong, name
FROM (
    SELECT *, (type LIKE '%CHAR%' OR type LIKE '%TEXT%') AND type NOT LIKE '%INT%' AS is_text
    FROM (
        SELECT lower(name) AS name, upper(type) || CASE
            WHEN "notnull" AND lower(name) = 'end_time' THEN ' NOT NULL' ELSE '' END AS type
        FROM pragma_table_info('t_resource_lock', 'main')
    )
) WHERE wrong IS NOT NULL LIMIT 1"""

READ = f"""
SELECT COALESCE(lock_flag = 1, 0), status, {_micros("begin_time")}, holder, expires_at,
       {_micros("claimed_at")}, end_time IS NOT NULL, client_ip, token, {NOW}
FROM t_resource_lock WHERE key_resource = ?"""

CREATE = f"""
INSERT INTO t_resource_lock
    (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
VALUES (?, 'S', 0, {_kept("begin_time", "0")}, '', ?, 0, 0) ON CONFLICT (key_resource) DO NOTHING"""

TAKE = f"""
UPDATE t_resource_lock
SET lock_flag = 1, status = 'P', client_ip = :label, holder = :holder, end_time = NULL,
    begin_time = CASE WHEN :verdict = 'same' THEN begin_time ELSE {_kept("begin_time", NOW)} END,
    claimed_at = CASE WHEN :verdict = 'same' THEN begin_time ELSE {_kept("begin_time", NOW)} END,
    token = CASE WHEN :verdict = 'same' THEN token ELSE max(token + 1, {NOW}) END,
    prior_token = CASE :verdict WHEN 'same' THEN prior_token WHEN 'taken over'
        THEN ifnull(
            iif(holder = zeroblob(16) AND claimed_at = begin_time, prior_token, NULL), token) END,
    prior_client_ip = CASE WHEN :verdict = 'same' THEN prior_client_ip ELSE client_ip END,
    prior_status = CASE WHEN :verdict = 'same' THEN prior_status ELSE status END,
    prior_begin_time = CASE WHEN :verdict = 'same' THEN prior_begin_time ELSE begin_time END,
    prior_end_time = CASE WHEN :verdict = 'same' THEN prior_end_time ELSE end_time END,
    expires_at = {NOW} + :lease
WHERE key_resource = :key AND token = :token AND COALESCE(lock_flag = 1, 0) = :locked
  AND holder IS :was AND status IS :status AND {_micros("begin_time")} IS :begin
  AND {_micros("claimed_at")} IS :claimed AND expires_at IS :expires
  AND (end_time IS NOT NULL) = :ended
RETURNING token, prior_token, prior_client_ip"""

OURS = """key_resource = :key AND holder = :holder AND token = :token
  AND lock_flag = 1 AND claimed_at = begin_time AND end_time IS NULL"""

LOOK = f"""
SELECT key_resource, CASE
           WHEN lock_flag = 1 AND holder IS NOT NULL AND claimed_at = begin_time
                AND end_time IS NULL THEN iif({NOW} >= expires_at, 'expired', 'held')
           WHEN lock_flag = 1 THEN 'held_by_another_program' ELSE 'free' END,
       token, lower(hex(holder)), client_ip, expires_at, (expires_at - {NOW}) / 1e6
FROM t_resource_lock WHERE key_resource BETWEEN ? AND ?"""

QUEUE = {
    "join": f"""
INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until)
SELECT ?, max(coalesce((SELECT max(ticket) + 1 FROM t_resource_lock_queue), 0), {NOW}),
       {NOW} + {ALIVE} * 1000000
RETURNING ticket""",
    "front": f"""
SELECT ticket, (alive_until - {NOW}) / 1e6
FROM t_resource_lock_queue WHERE key_resource = ? AND ticket <= ? ORDER BY ticket LIMIT {FRONT}""",
    "stay": f"""
UPDATE t_resource_lock_queue SET alive_until = {NOW} + {ALIVE} * 1000000 WHERE ticket = ?""",
    "leave": "DELETE FROM t_resource_lock_queue WHERE ticket = ?",
    "clear": f"DELETE FROM t_resource_lock_queue WHERE ticket = ? AND alive_until <= {NOW}",
}

CHANGES = {
    "renew": f"expires_at = max(ifnull(expires_at, 0), {NOW} + :argument)",
    "release": f"""lock_flag = 0, status = :argument, end_time = {_kept("end_time", NOW)},
        holder = NULL, expires_at = NULL, claimed_at = NULL, prior_token = NULL,
        prior_client_ip = NULL""",
    "abandon": f"expires_at = min(expires_at, {NOW})",
    "put back": f"""lock_flag = prior_token NOTNULL, status = prior_status,
        begin_time = prior_begin_time, end_time = prior_end_time, client_ip = prior_client_ip,
        holder = iif(prior_token NOTNULL, zeroblob(16), NULL), prior_client_ip = NULL,
        expires_at = iif(prior_token NOTNULL, {NOW}, NULL),
        claimed_at = iif(prior_token NOTNULL, prior_begin_time, NULL)""",
    "confirm": "confirms = confirms + 1",
}


def change_statement(change: str) -> str:
    return f"UPDATE t_resource_lock SET {CHANGES[change]} WHERE {OURS} RETURNING confirms"


def parameters(claim: Claim, argument: Any = None) -> dict[str, Any]:
    holder = uuid.UUID(claim.holder).bytes
    return {"key": claim.key, "holder": holder, "token": claim.token, "argument": argument}


class SqliteSession:
    """Sends requests to a file. A connection is opened for the first request, and kept."""

    patience = PATIENCE
    listener: Any = None

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None

    def send(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        """Sends requests of one kind in one transaction, and returns their replies."""
        if kind == "look":
            return [self._look(keys) for keys in requests]
        if kind == "await":
            return [False] * len(requests)
        if kind == "open":
            return [self._run("SELECT 1") for _ in requests]
        if kind in QUEUE:
            rows = [self._run(QUEUE[kind], values) for values in requests]
            return [one[0] for one in rows] if kind == "join" else rows
        if kind == "claim":
            return self._claims(requests)
        if kind == "claim all":
            return self._together(lambda asked: self._claim_all(*asked), requests)
        return self._together(lambda change: self._change(kind, change), requests)

    def _claims(self, requests: Sequence[tuple[Terms, str]]) -> list[Any]:
        """What is refused is only read: it waits for no transaction that writes."""
        replies: list[Any] = [self._judged(*request) for request in requests]
        places = [place for place, reply in enumerate(replies) if not isinstance(reply, Refusal)]
        granted = self._together(lambda place: self._claim(*requests[place]), places)
        for place, reply in zip(places, granted, strict=True):
            replies[place] = reply
        return replies

    def _together(self, do: Callable[[Any], Any], requests: Sequence[Any]) -> list[Any]:
        """Does it for each request in one transaction, which ends with one commit."""
        if not requests:
            return []
        self._run("BEGIN IMMEDIATE")
        try:
            replies = [do(one) for one in requests]
            self._run("COMMIT")
        except BaseException:
            if self._connection is not None and self._connection.in_transaction:
                self.close()  # Whatever failed leaves no transaction open.
            raise
        return replies

    def _claim_all(self, asked: Sequence[Terms], holder: str) -> list[Granted] | Refusal:
        """Claims all keys or none, also beside other requests in the transaction."""
        self._run("SAVEPOINT rowlock")
        granted: list[Granted] = []
        for terms in asked:
            reply = self._claim(terms, holder)
            if isinstance(reply, Refusal):
                self._run("ROLLBACK TO rowlock")
                return reply
            granted.append(reply)
        return granted

    def _judged(
        self, terms: Terms, holder: str
    ) -> Refusal | tuple[Verdict, tuple[Any, ...]] | None:
        """Returns a refusal, or a verdict that grants and the row; none if there is no row."""
        found = self._first(READ, (terms.key,))
        if found is None:
            return None
        locked, status, begin, was, expires, claimed, ended, label, _, now = found
        held_by = str(uuid.UUID(bytes=was)) if was else None
        row = Row(bool(locked), status or "", begin, held_by, expires, claimed, bool(ended))
        verdict = judge(row, now, holder, terms.rules, _micros_of(terms.min_interval))
        if verdict.granted:
            return verdict, found
        until = verdict.until
        after = None if until is None else max(until - now, 0) / 1_000_000
        since = from_micros(begin)
        return Refusal(terms.key, verdict.name, label, since, from_micros(until), after)

    def _claim(self, terms: Terms, holder: str) -> Granted | Refusal:
        judged = self._judged(terms, holder)
        if judged is None:
            minutes = max(60, -(-_micros_of(terms.min_interval) // 60_000_000))
            self._run(CREATE, (terms.key, minutes))
            judged = self._judged(terms, holder)
        if judged is None:
            return Refusal(terms.key, "busy", retry_after=BUSY)
        if isinstance(judged, Refusal):
            return judged
        verdict, (locked, status, begin, was, expires, claimed, ended, label, token, _) = judged
        taken = self._first(
            TAKE,
            {
                "token": token, "locked": locked, "was": was, "status": status, "begin": begin,
                "claimed": claimed, "expires": expires, "ended": ended, "key": terms.key,
                "holder": uuid.UUID(holder).bytes, "label": terms.label,
                "verdict": verdict.name, "lease": _micros_of(terms.lease),
            },
        )  # fmt: skip
        if taken is None:
            return Refusal(terms.key, "busy", label, from_micros(begin), retry_after=BUSY)
        previous = None if taken[1] is None else Previous(taken[1], taken[2] or "")
        return Granted(Claim(terms.key, holder, taken[0]), previous)

    def _change(self, kind: str, change: Change) -> str:
        claim, value = change.claim, change.value
        if kind == "renew":
            value = _micros_of(value)
        if self._run(change_statement(kind), parameters(claim, value)):
            return "done"
        row = self._first(READ, (claim.key,))
        if row is None or row[8] != claim.token:
            return "lost"
        # An earlier request, whose reply was lost, has ended the claim.
        if kind != "renew" and (row[3] == bytes(16) or (not row[0] and row[3] is None)):
            return "done"
        return "lost"

    def _look(self, keys: Range) -> list[Seen]:
        return [read_row(row) for row in self._run(LOOK, (keys.first, keys.last))]

    def _first(self, sql: str, values: Any) -> tuple[Any, ...] | None:
        rows = self._run(sql, values)
        return rows[0] if rows else None

    def _run(self, sql: str, values: Any = ()) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = self._open()
            try:
                if wrong := self._first(WRONG, ()):
                    raise Error(
                        "the table t_resource_lock cannot be used: "
                        f"its column {wrong[1]} {wrong[0]}"
                    )
            except BaseException:
                self.close()
                raise
        try:
            # All rows are read: only at its end does a statement commit.
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            meant = meaning(error)
            if isinstance(meant, Contention) and sql != "COMMIT":
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            else:
                self.close()
            raise meant from error

    def _open(self) -> sqlite3.Connection:
        if sqlite3.sqlite_version_info < (3, 37):
            raise Error(f"SQLite {sqlite3.sqlite_version} is too old: 3.37 or later is needed")
        connection = opened(self._connect)
        try:
            self._file = opened(lambda: _identity(connection))
            if self._file in _of_parent:
                raise Error(
                    "the database file was in use when this process was forked, so that SQLite "
                    "would lose its locks: make the first call after the fork, or start the "
                    "process anew"
                )
        except BaseException:
            connection.close()
            raise
        _files.append(self._file)
        return connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            with contextlib.suppress(ValueError):  # A parent's session is none of this process.
                _files.remove(self._file)


#: The files of the sessions that are open, by device and number.
_files: list[tuple[int, int]] = []
#: Those that were open in the parent at the fork. SQLite counts locks on a file by process: a child
#: that opens it again takes none, and goes on in a log that the parent deletes when it closes it.
_of_parent: set[tuple[int, int]] = set()


def file_of(connection: sqlite3.Connection) -> str:
    cursor = connection.cursor()
    cursor.row_factory = None
    rows = cursor.execute("PRAGMA database_list").fetchall()
    files = [row[2] for row in rows if row[1] == "main"]
    if not files or not files[0]:
        raise Error("a database in memory has one connection: use a file for its locks")
    return str(files[0])


def _identity(connection: sqlite3.Connection) -> tuple[int, int]:
    status = os.stat(file_of(connection))
    return status.st_dev, status.st_ino


def _forked() -> None:
    _of_parent.update(_files)
    _files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _micros_of(seconds: float) -> int:
    return round(seconds * 1_000_000)


def meaning(error: sqlite3.Error) -> Exception:
    text = str(error)
    if "is locked" in text or "is busy" in text:
        return Contention()
    if "is full" in text:
        return Overload()
    if text.startswith(("no such table", "no such column")):
        return NotInstalled(f"{text}: run `rowlock migrate` once")
    return Error(f"the database failed: {text}")


def connect(file: str) -> sqlite3.Connection:
    # The threads of the library use it one after the other. It creates no file.
    path = file.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    uri = f"file:{path}?mode=rw"
    try:
        return sqlite3.connect(
            uri, uri=True, timeout=0.05, isolation_level=None, check_same_thread=False
        )
    except sqlite3.OperationalError as error:
        raise sqlite3.OperationalError(f"{error} {file!r}") from None
