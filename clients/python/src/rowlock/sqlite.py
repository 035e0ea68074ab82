"""SQLite: the crate's own statements, on a connection of the lease's own."""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable
from typing import Any

from .errors import Contention, Error, NotInstalled, Outage, Refusal
from .opening import opened
from .protocol import Claim, Granted, Previous, Terms, from_micros
from .rules import Row, judge

#: For how many seconds a claim is tried again while another connection writes.
BUSY = 0.1

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
        SELECT upper(sql) LIKE '%COLLATE%' FROM main.sqlite_schema
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
    prior_token = CASE :verdict WHEN 'same' THEN prior_token WHEN 'taken over' THEN token END,
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

CHANGES = {
    "renew": f"expires_at = max(ifnull(expires_at, 0), {NOW} + :argument)",
    "release": f"""lock_flag = 0, status = :argument, end_time = {_kept("end_time", NOW)},
        holder = NULL, expires_at = NULL, claimed_at = NULL, prior_token = NULL,
        prior_client_ip = NULL""",
    "abandon": f"expires_at = min(expires_at, {NOW})",
    "confirm": "confirms = confirms + 1",
}


def change_statement(change: str) -> str:
    return f"UPDATE t_resource_lock SET {CHANGES[change]} WHERE {OURS} RETURNING confirms"


def parameters(claim: Claim, argument: Any = None) -> dict[str, Any]:
    holder = uuid.UUID(claim.holder).bytes
    return {"key": claim.key, "holder": holder, "token": claim.token, "argument": argument}


class SqliteSession:
    """Sends requests to a file. A connection is opened for the first request, and kept."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None

    def claim(self, terms: Terms, holder: str) -> Granted | Refusal:
        until = time.monotonic() + BUSY
        while True:
            try:
                reply = self._attempt(terms, holder)
            except Contention:
                reply = Refusal(terms.key, "busy", retry_after=BUSY)
            if isinstance(reply, Granted) or reply.reason != "busy" or time.monotonic() >= until:
                return reply
            time.sleep(0.005)

    def _attempt(self, terms: Terms, holder: str) -> Granted | Refusal:
        gap = round(terms.min_interval * 1_000_000)
        found = self._run(READ, (terms.key,))
        if found is None:
            self._run(CREATE, (terms.key, max(60, -(-gap // 60_000_000))))
            found = self._run(READ, (terms.key,))
        if found is None:
            return Refusal(terms.key, "busy", retry_after=BUSY)
        locked, status, begin, was, expires, claimed, ended, label, token, now = found
        held_by = str(uuid.UUID(bytes=was)) if was else None
        row = Row(bool(locked), status or "", begin, held_by, expires, claimed, bool(ended))
        verdict = judge(row, now, holder, terms.rules, gap)
        busy = Refusal(terms.key, "busy", label, from_micros(begin), retry_after=BUSY)
        if not verdict.granted:
            until = verdict.until
            after = None if until is None else max(until - now, 0) / 1_000_000
            return Refusal(
                terms.key, verdict.name, label, from_micros(begin), from_micros(until), after
            )
        seen = {
            "token": token, "locked": locked, "was": was, "status": status, "begin": begin,
            "claimed": claimed, "expires": expires, "ended": ended,
        }  # fmt: skip
        taken = self._run(
            TAKE,
            seen
            | {
                "key": terms.key,
                "holder": uuid.UUID(holder).bytes,
                "label": terms.label,
                "verdict": verdict.name,
                "lease": round(terms.lease * 1_000_000),
            },
        )
        if taken is None:
            return busy
        previous = None if taken[1] is None else Previous(taken[1], taken[2] or "")
        return Granted(Claim(terms.key, holder, taken[0]), previous)

    def change(self, change: str, claim: Claim, argument: Any = None) -> str:
        if change == "renew":
            argument = round(argument * 1_000_000)
        if self._run(change_statement(change), parameters(claim, argument)):
            return "done"
        row = self._run(READ, (claim.key,))
        if row is None or row[8] != claim.token:
            return "lost"
        # An earlier request, whose reply was lost, has ended the claim.
        if change in ("release", "abandon") and not row[0] and row[3] is None:
            return "done"
        return "lost"

    def _run(self, sql: str, values: Any) -> tuple[Any, ...] | None:
        if self._connection is None:
            self._connection = self._open()
            try:
                if wrong := self._run(WRONG, ()):
                    raise Error(
                        "the table t_resource_lock cannot be used: "
                        f"its column {wrong[1]} {wrong[0]}"
                    )
            except BaseException:
                self.close()
                raise
        try:
            # All rows are read: only at its end does a statement commit.
            rows = self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            meant = meaning(error)
            if not isinstance(meant, Contention):
                self.close()
            raise meant from error
        return rows[0] if rows else None

    def _open(self) -> sqlite3.Connection:
        if sqlite3.sqlite_version_info < (3, 37):
            raise Error(f"SQLite {sqlite3.sqlite_version} is too old: 3.37 or later is needed")
        try:
            connection = opened(self._connect)
            connection.isolation_level = None
            connection.row_factory = None
            connection.execute("PRAGMA busy_timeout = 50")
        except sqlite3.Error as error:
            raise Outage(sent=False) from error
        return connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def meaning(error: sqlite3.Error) -> Exception:
    text = str(error)
    if "is locked" in text or "is busy" in text:
        return Contention()
    if text.startswith(("no such table", "no such column")):
        return NotInstalled(f"{text}: run `rowlock migrate` once")
    return Error(f"the database failed: {text}")
