"""PostgreSQL: the functions, called through psycopg."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from .deadlines import answer, limit
from .errors import Contention, Error, NotInstalled, Outage, Overload, Refusal
from .functions import INSTALL, FunctionSession, read_reply, read_row, text
from .opening import NAME, NOT_READ, is_of_driver, missing
from .protocol import PATIENCE, Change, Granted, Range, Seen
from .terms import Terms
from .tickets import ALIVE, FRONT

# Times are numbers, in microseconds: psycopg reads the text of times in one DateStyle alone. The
# requests of many tasks are the elements of arrays, so that they share a statement and a commit.
CLAIM = """
SELECT r.granted, r.token, r.previous_token, r.previous_label, r.reason, r."by",
       (extract(epoch FROM r.since) * 1000000)::bigint,
       (extract(epoch FROM r.until) * 1000000)::bigint, extract(epoch FROM r.retry_after)::float8
FROM unnest(%s::text[], %s::float8[], %s::text[], %s::float8[], %s::text[], %s::uuid[])
    WITH ORDINALITY AS a (key, lease, label, gap, rules, holder, place),
    LATERAL rowlock_try_acquire(
        a.key, a.lease * interval '1 second', a.label, a.gap * interval '1 second', a.rules,
        a.holder) r
ORDER BY a.place"""
CHANGE = """
SELECT {call}
FROM unnest(%s::text[], %s::uuid[], %s::bigint[], %s::{value}[])
    WITH ORDINALITY AS a (key, holder, token, value, place)
ORDER BY a.place"""
#: Of many rows, those that another transaction has locked are not tried: each would take 100 ms.
RENEW_MANY = """
WITH asked AS MATERIALIZED (
    SELECT a.* FROM unnest(%s::text[], %s::uuid[], %s::bigint[], %s::float8[])
        WITH ORDINALITY AS a (key, holder, token, value, place)
), free AS MATERIALIZED (
    SELECT a.place FROM asked a JOIN t_resource_lock t ON t.key_resource = a.key
    FOR UPDATE OF t SKIP LOCKED
)
SELECT CASE WHEN f.place IS NULL THEN rowlock_unmatched('renew', a.key, a.holder, a.token)
            ELSE rowlock_renew(a.key, a.holder, a.token, a.value * interval '1 second') END
FROM asked a LEFT JOIN free f ON f.place = a.place
ORDER BY a.place"""
CHANGES = {
    kind: CHANGE.format(call=f"rowlock_{name}(a.key, a.holder, a.token{more})", value=value)
    for kind, name, more, value in (
        ("renew", "renew", ", a.value * interval '1 second'", "float8"),
        ("release", "release", ", a.value", "text"),
        ("abandon", "abandon", "", "text"),
        ("put back", "put_back", "", "text"),
    )
}
#: As the primary has it: a standby refuses, and with synchronous replication the look is a commit,
#: to which a primary that was replaced gets no reply. An asynchronous one would wait for none.
LOOK = """
WITH primary_only AS MATERIALIZED (
    SELECT CASE WHEN current_setting('synchronous_commit') = 'off'
                THEN set_config('synchronous_commit', 'on', true) END,
           CASE WHEN pg_is_in_recovery() THEN pg_current_xact_id()::text
                WHEN current_setting('synchronous_standby_names') <> ''
                THEN pg_logical_emit_message(true, 'rowlock', ''::text)::text END AS as_primary
)
SELECT t.key_resource::text,
       CASE WHEN s.stands THEN CASE WHEN clock_timestamp() >= t.expires_at THEN 'expired'
                                    ELSE 'held' END
            WHEN t.lock_flag = 1 THEN 'held_by_another_program' ELSE 'free' END,
       t.token, t.holder::text, t.client_ip::text,
       CASE WHEN isfinite(t.expires_at) THEN
           (extract(epoch FROM t.expires_at) * 1000000)::bigint END,
       CASE WHEN isfinite(t.expires_at) THEN
           extract(epoch FROM t.expires_at - clock_timestamp())::float8 END
FROM t_resource_lock t CROSS JOIN LATERAL (
    SELECT t.lock_flag = 1 AND t.holder IS NOT NULL AND t.claimed_at = t.begin_time
           AND t.end_time IS NULL AS stands) s
WHERE t.key_resource COLLATE "C" BETWEEN %s AND %s
  AND (SELECT as_primary FROM primary_only) IS DISTINCT FROM ''"""
#: Asks for a notification, and tells whether a row is free already. A locked row is left alone. The
#: mark is a hint, which may be lost: its commit does not wait for the disk.
AWAIT = """
WITH quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)),
locked AS MATERIALIZED (
    SELECT t.key_resource, t.lock_flag, t.awaited FROM quick, t_resource_lock t
    WHERE t.key_resource = ANY (%s::text[]) FOR UPDATE OF t SKIP LOCKED
), marked AS (
    UPDATE t_resource_lock t SET awaited = true FROM locked l
    WHERE t.key_resource = l.key_resource AND NOT l.awaited
)
SELECT coalesce(bool_or(lock_flag <> 1), false) FROM locked"""
UNTIL = f"clock_timestamp() + interval '{ALIVE} s'"
QUEUE = {
    "join": f"""
INSERT INTO t_resource_lock_queue (key_resource, alive_until) VALUES (%s, {UNTIL})
RETURNING ticket""",
    "front": f"""
SELECT ticket, extract(epoch FROM alive_until - clock_timestamp())::float8
FROM t_resource_lock_queue WHERE key_resource = %s AND ticket <= %s
ORDER BY ticket LIMIT {FRONT}""",
    "stay": f"UPDATE t_resource_lock_queue SET alive_until = {UNTIL} WHERE ticket = %s",
    "leave": "DELETE FROM t_resource_lock_queue WHERE ticket = %s",
    "clear": """
DELETE FROM t_resource_lock_queue WHERE ticket = %s AND alive_until <= clock_timestamp()""",
}
CONFIRM = "SELECT rowlock_confirm(%s, %s::uuid, %s)"
#: With the schemas of the functions and of the table to which the search_path leads.
VERSION = """
SELECT rowlock_version(),
       (SELECT p.pronamespace FROM pg_proc p WHERE p.oid = to_regproc('rowlock_version'))
       IS NOT DISTINCT FROM
       (SELECT c.relnamespace FROM pg_class c WHERE c.oid = to_regclass('t_resource_lock'))"""


class PostgresSession(FunctionSession):
    """Calls the functions of PostgreSQL through psycopg."""

    version = VERSION

    def _check(self, row: Sequence[Any]) -> None:
        super()._check(row)
        if not row[1]:
            raise NotInstalled(
                "the search_path leads to the functions in one schema and to t_resource_lock in "
                f"another: {INSTALL}"
            )

    def _claims(self, requests: Sequence[tuple[Terms, str]]) -> list[Granted | Refusal]:
        columns = [
            [terms.key for terms, _ in requests],
            [terms.lease for terms, _ in requests],
            [terms.label for terms, _ in requests],
            [terms.min_interval for terms, _ in requests],
            [terms.rules for terms, _ in requests],
            [holder for _, holder in requests],
        ]
        rows = self._run(CLAIM, columns)
        return [
            read_reply(terms, holder, row)
            for (terms, holder), row in zip(requests, rows, strict=True)
        ]

    def _changes(self, kind: str, changes: Sequence[Change]) -> list[str]:
        columns = [
            [change.claim.key for change in changes],
            [change.claim.holder for change in changes],
            [change.claim.token for change in changes],
            [change.value for change in changes],
        ]
        statement = RENEW_MANY if kind == "renew" and len(changes) > 1 else CHANGES[kind]
        return [text(row[0]) for row in self._run(statement, columns)]

    def _look(self, keys: Range) -> list[Seen]:
        return [read_row(row) for row in self._run(LOOK, (keys.first, keys.last))]

    def _await(self, keys: Sequence[str]) -> list[bool]:
        if self.listener is None or not self.listener.need():
            return [False] * len(keys)
        is_free = self._run(AWAIT, [list(keys)])[0][0]
        return [is_free] * len(keys)

    def _queue(self, kind: str, values: Sequence[Any]) -> Any:
        rows = self._run(QUEUE[kind], values)
        return rows[0] if kind == "join" else rows

    def _begin(self) -> None:
        self._run("BEGIN ISOLATION LEVEL READ COMMITTED")

    def _end(self, how: str) -> None:
        self._run(how)

    def _cursor(self, connection: Any) -> Any:
        from psycopg import Cursor
        from psycopg.rows import tuple_row

        limit(connection, self.patience)
        return Cursor(connection, row_factory=tuple_row)

    def _meaning(self, error: Exception) -> Exception:
        return meaning(error)


def meaning(error: Exception) -> Exception:
    """What an error of psycopg means for a request that was sent."""
    if isinstance(error, TimeoutError):
        return Outage(sent=True)
    state: str | None = getattr(error, "sqlstate", None)
    if state in ("40001", "40P01", "55P03"):
        return Contention()
    severity = error.diag.severity_nonlocalized if hasattr(error, "diag") else None
    if severity in ("FATAL", "PANIC") and state and state.startswith(("53", "58", "XX")):
        return Outage(sent=True)  # The record of the commit may be on the disk.
    if state is not None and (state == "57014" or (state.startswith("53") and state != "53300")):
        return Overload()  # The first: a statement_timeout.
    if state == "25006":  # A standby, or a server before its fail-over has ended.
        return Outage(sent=False)
    if state in ("42883", "42P01", "42703"):
        return NotInstalled(f"{str(error).splitlines()[0]}: {INSTALL}")
    lost = ("25P03", "25P04", "40003", "53300")
    if state is None and not is_of_driver(error):
        return Error(f"the request could not be sent: {error!r}")
    if state is None or state in lost or state.startswith(("08", "57P")):
        return Outage(sent=True)
    return Error(f"the database refused: {str(error).splitlines()[0]}")


def connect(place: dict[str, Any], patience: float = PATIENCE, **more: Any) -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise missing("psycopg", "'psycopg[binary]'") from error
    from psycopg.conninfo import conninfo_to_dict

    # A renewal leaves time for another one on a new connection. The limit is that of each address.
    timeout = math.ceil(patience)
    defaults: dict[str, Any] = {"connect_timeout": timeout, "fallback_application_name": NAME}
    try:
        given = conninfo_to_dict(place.get("conninfo") or "")
        defaults = {name: value for name, value in defaults.items() if name not in given}
        return psycopg.connect(**(defaults | place | more))
    except psycopg.ProgrammingError as error:
        # Its message has the text, which may have a password.
        if known := re.search('invalid URI query parameter: "[a-z_]+"', str(error)):
            raise ValueError(f"the URL is not one of PostgreSQL: {known[0]}") from None
        raise ValueError(NOT_READ) from None


def listening(place: dict[str, Any]) -> Any:
    """Opens a connection for notifications, or returns none behind a pooler that shares sessions.

    It asks for a setting of its own, which such a pooler rejects or omits.
    """
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.rows import tuple_row

    given = conninfo_to_dict(place.get("conninfo") or "").get("options")
    options = f"{place.get('options') or given or ''} -c rowlock.own_session=on"
    try:
        connection = connect(place, options=options, autocommit=True, row_factory=tuple_row)
    except psycopg.OperationalError as error:
        if "unsupported startup parameter" in str(error):
            return None
        raise
    is_own = False
    try:
        asked = answer(connection, "SELECT current_setting('rowlock.own_session', true)")
        is_own = asked.fetchone() == ("on",)
    finally:
        if not is_own:
            connection.close()
    return connection if is_own else None
