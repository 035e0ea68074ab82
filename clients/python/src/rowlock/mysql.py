"""MySQL and MariaDB: the procedures, called through PyMySQL or mysqlclient."""

from __future__ import annotations

import functools
import math
import selectors
import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from .deadlines import SELECTOR
from .errors import Contention, Error, NotInstalled, Outage, Overload, Refusal
from .functions import INSTALL, NO_PROCEDURE, FunctionSession, read_reply, read_row, text
from .opening import NAME, NOT_READ, is_of_driver, missing
from .protocol import PATIENCE, Change, Granted, Range, Seen
from .terms import Terms
from .tickets import ALIVE, FRONT

CLAIM = "CALL rowlock_try_acquire(%s, %s, %s, %s, %s, %s)"
CHANGES = {
    "renew": "CALL rowlock_renew(%s, %s, %s, %s)",
    "release": "CALL rowlock_release(%s, %s, %s, %s)",
    "abandon": "CALL rowlock_abandon(%s, %s, %s)",
    "put back": "CALL rowlock_put_back(%s, %s, %s)",
}
LOOK = """
SELECT CONVERT(t.key_resource USING utf8mb4),
       CASE WHEN t.lock_flag = 1 AND t.holder IS NOT NULL AND t.claimed_at = t.begin_time
                 AND t.end_time IS NULL
            THEN IF(UTC_TIMESTAMP(6) >= t.expires_at, 'expired', 'held')
            WHEN t.lock_flag = 1 THEN 'held_by_another_program' ELSE 'free' END,
       t.token, LOWER(HEX(t.holder)), CONVERT(t.client_ip USING utf8mb4),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', t.expires_at),
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), t.expires_at) / 1000000
FROM t_resource_lock t
WHERE t.key_resource BETWEEN CONVERT(%s USING utf8mb4) AND CONVERT(%s USING utf8mb4)"""
UNTIL = f"UTC_TIMESTAMP(6) + INTERVAL {ALIVE} SECOND"
QUEUE = {
    "join": f"""
INSERT INTO t_resource_lock_queue (key_resource, alive_until) VALUES (%s, {UNTIL})""",
    "front": f"""
SELECT ticket, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), alive_until) / 1000000
FROM t_resource_lock_queue WHERE key_resource = %s AND ticket <= %s
ORDER BY ticket LIMIT {FRONT}""",
    "stay": f"UPDATE t_resource_lock_queue SET alive_until = {UNTIL} WHERE ticket = %s",
    "leave": "DELETE FROM t_resource_lock_queue WHERE ticket = %s",
    "clear": """
DELETE FROM t_resource_lock_queue WHERE ticket = %s AND alive_until <= UTC_TIMESTAMP(6)""",
}
CONFIRM = "CALL rowlock_confirm(%s, %s, %s)"
VERSION = "CALL rowlock_version()"
# As in src/store/fault.rs.
CONTENTION = {1213, 1205, 1020, 3101, 3572}
OVERLOAD = {1021, 1037, 1038, 1041, 1114, 1206, 3024}
READ_ONLY = {1290, 1792, 1836}
OUTAGES = (
    {1040, 1047, 1053, 1180, 1203, 1226, 1317, 1598, 1927, 1969, 3032, 3100, 3169, 4031, 9001}
    | {3781, 3782, 3783} | {3796, 3797, 3798, 3799}
)  # fmt: skip


class MysqlSession(FunctionSession):
    """Calls the procedures of MySQL and MariaDB through PyMySQL or mysqlclient."""

    version = VERSION
    _is_causal = False
    _logs_statements = False

    def _claims(self, requests: Sequence[tuple[Terms, str]]) -> list[Granted | Refusal]:
        # The first claim on a key waits a second for another transaction that creates its row.
        self.patience = max(2.0, self.patience)
        return self._each(lambda request: self._claim(*request), requests)

    def _claim(self, terms: Terms, holder: str) -> Granted | Refusal:
        asked = (terms.key, terms.lease, terms.label, terms.min_interval, terms.rules, holder)
        row = self._run(CLAIM, asked)[0]
        # Without the holder and the end of the lease.
        return read_reply(terms, holder, (*row[:2], *row[4:]))

    def _changes(self, kind: str, changes: Sequence[Change]) -> list[str]:
        first = changes[0]
        return self._each(lambda change: self._change(kind, change, change is first), changes)

    def _change(self, kind: str, change: Change, is_first: bool) -> str:
        named = (change.claim.key, change.claim.holder, change.claim.token)
        values = named if change.value is None else (*named, change.value)
        try:
            return text(self._run(CHANGES[kind], values)[0][0])
        except Contention as contention:
            if isinstance(contention, Overload) and is_first:
                raise
            return "busy"  # What was done of the others stands, and is not sent again.

    def _look(self, keys: Range) -> list[Seen]:
        causal = "SET STATEMENT wsrep_sync_wait = 1 FOR " if self._is_causal else ""
        return [read_row(row) for row in self._run(causal + LOOK, (keys.first, keys.last))]

    def _queue(self, kind: str, values: Sequence[Any]) -> Any:
        rows = self._run(QUEUE[kind], values)
        if kind == "join":
            return self._run("SELECT LAST_INSERT_ID()")[0]
        return [(number, float(left)) for number, left in rows]

    def _check(self, row: Sequence[Any]) -> None:
        super()._check(row)
        # InnoDB writes nothing at READ COMMITTED then.
        rows = self._run("SHOW SESSION VARIABLES LIKE 'binlog_format'")
        self._logs_statements = bool(rows) and text(rows[0][1]) == "STATEMENT"
        # Looks wait until this node has applied what others of its cluster have committed.
        if "mariadb" in text(self._run("SELECT VERSION()")[0][0]).lower():
            # One that is built without clusters lacks the variable.
            self._is_causal = bool(self._run("SHOW SESSION VARIABLES LIKE 'wsrep_sync_wait'"))
            return
        rows = self._run("SHOW SESSION VARIABLES LIKE 'group_replication_consistency'")
        level = text(rows[0][1]) if rows else "BEFORE"
        if "BEFORE" != level != "BEFORE_AND_AFTER":
            wanted = "BEFORE_AND_AFTER" if level == "AFTER" else "BEFORE"
            self._run(f"SET SESSION group_replication_consistency = '{wanted}'")

    def _begin(self) -> None:
        if not self._logs_statements:
            self._run("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self._run("START TRANSACTION")

    def _end(self, how: str) -> None:
        # Whatever completion_type says: a transaction that followed would never be committed.
        self._run(f"{how} AND NO CHAIN NO RELEASE")

    def _cursor(self, connection: Any) -> Any:
        limit(connection, self.patience)
        # The plain one, whatever rows the connection makes by default.
        if type(connection).__module__.startswith("MySQLdb"):
            from MySQLdb.cursors import Cursor

            return connection.cursor(Cursor)
        from pymysql.cursors import Cursor as PlainCursor

        return connection.cursor(PlainCursor)

    def _meaning(self, error: Exception) -> Exception:
        return meaning(error)


def meaning(error: Exception) -> Exception:
    """What an error of PyMySQL or mysqlclient means for a request that was sent."""
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    if code in CONTENTION:
        return Contention()
    if code in OVERLOAD:
        return Overload()
    if code in READ_ONLY:
        return Outage(sent=False)
    if code in (NO_PROCEDURE, 1146, 1054):
        return NotInstalled(f"{error}: {INSTALL}")
    if code == 0 and not is_of_driver(error):
        return Error(f"the request could not be sent: {error!r}")
    if code in OUTAGES or 2000 <= code < 3000 or code == 0:
        return Outage(sent=True)
    return Error(f"the database refused: {error}")


def prepare(connection: Any, patience: float) -> None:
    """Makes a connection one for leases: it commits each statement, and its waits have a limit."""
    limit(connection, patience)
    # What opened it may have begun a transaction, also one that autocommit does not end.
    connection.query(b"COMMIT AND NO CHAIN NO RELEASE")
    connection.query(b"SET autocommit = 1")


def limit(connection: Any, patience: float) -> None:
    """Limits each wait for a reply on a connection that is open."""
    if hasattr(connection, "_read_timeout"):  # PyMySQL, which has no public one.
        connection._read_timeout = connection._write_timeout = math.ceil(patience)
    elif hasattr(connection, "read_query_result"):
        connection.query = functools.partial(_query, connection, patience)


def _query(connection: Any, patience: float, sql: Any) -> None:
    """Sends a query by mysqlclient, which reads a reply without a limit once it has begun."""
    connection.send_query(bytes(sql))
    with SELECTOR() as selector:
        selector.register(connection.fileno(), selectors.EVENT_READ)
        if not selector.select(patience):
            raise TimeoutError(f"no reply in {patience:.1f} s")
    connection.read_query_result()


#: Parameters that concern texts and results of the application alone.
_NOT_NEEDED = {
    "charset", "collation", "use_unicode", "binary_prefix", "local_infile", "autocommit",
    "connect_timeout", "read_timeout", "write_timeout", "timezone",
}  # fmt: skip


def place_of(text: str) -> dict[str, Any]:
    try:
        url = urlsplit(text)
        port = url.port or 3306
    except ValueError:  # Its message may have a part of the password.
        raise ValueError(NOT_READ) from None
    place: dict[str, Any] = {
        "host": url.hostname or "localhost",
        "port": port,
        "user": unquote(url.username or ""),
        "password": unquote(url.password or ""),
        "database": unquote(url.path.lstrip("/")),
    }
    given = {name.replace("-", "_").lower(): value for name, value in parse_qsl(url.query)}
    if socket := given.pop("unix_socket", given.pop("socket", None)):
        place["unix_socket"] = socket
    names = ("mode", "ca", "cert", "key", "disabled", "verify_cert", "verify_identity")
    place |= {f"ssl_{name}": given.pop(f"ssl_{name}") for name in names if f"ssl_{name}" in given}
    if others := sorted(given.keys() - _NOT_NEEDED):
        names_of = ", ".join(others)
        raise ValueError(f"the URL has parameters that are not known ({names_of}): pass a function")
    return place


def driver() -> Any:
    try:
        import pymysql
    except ImportError:
        try:
            import MySQLdb
        except ImportError as error:
            raise missing("PyMySQL", "PyMySQL") from error
        return MySQLdb
    return pymysql


def limits(patience: float) -> dict[str, Any]:
    """Returns the parameters that limit each wait of a connection, its opening included."""
    return dict.fromkeys(("connect_timeout", "read_timeout", "write_timeout"), math.ceil(patience))


def connect(patience: float, place: dict[str, Any]) -> Any:
    module = driver()
    place = {name: value for name, value in place.items() if value is not None}
    tls = {name[4:]: place.pop(name) for name in list(place) if name.startswith("ssl_")}
    settings = limits(patience) | {"charset": "utf8mb4", "autocommit": True}
    if module.__name__ == "pymysql":
        settings |= _pymysql_tls(tls) | {"program_name": NAME}
    else:
        # These limits stay as they are. No later patience is longer.
        settings |= limits(PATIENCE) | {"connect_timeout": math.ceil(patience)}
        if tls:
            files = {name: tls[name] for name in ("ca", "cert", "key") if name in tls}
            settings |= {"ssl_mode": _mode(tls)} | ({"ssl": files} if files else {})
    return module.connect(**(settings | place))


def _mode(tls: dict[str, str]) -> str:
    """Returns how a connection to MySQL or MariaDB is encrypted, in MySQL's words."""
    if "mode" in tls:
        return tls["mode"].upper()
    if _is_true(tls.get("disabled")):
        return "DISABLED"
    if _is_true(tls.get("verify_identity")):
        return "VERIFY_IDENTITY"
    return "VERIFY_CA" if "ca" in tls or _is_true(tls.get("verify_cert")) else "REQUIRED"


def _is_true(value: str | None) -> bool:
    return value is not None and value.lower() in ("1", "true", "yes", "on")


def _pymysql_tls(tls: dict[str, str]) -> dict[str, Any]:
    mode = _mode(tls) if tls else "PREFERRED"
    if mode == "PREFERRED":
        return {}
    if mode == "DISABLED":
        return {"ssl_disabled": True}
    if mode not in ("REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY"):
        raise ValueError(f"ssl-mode {mode[:40]} of the URL is not known")
    context = ssl.create_default_context(cafile=tls.get("ca"))
    context.check_hostname = mode == "VERIFY_IDENTITY"
    context.verify_mode = ssl.CERT_NONE if mode == "REQUIRED" else ssl.CERT_REQUIRED
    if "cert" in tls:
        context.load_cert_chain(tls["cert"], tls.get("key"))
    return {"ssl": context}
