"""Where sessions lead: a URL, a connection, a pool, or a function that connects."""

from __future__ import annotations

import inspect
import math
import os
import re
import sqlite3
import ssl
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from .deadlines import prepare
from .errors import Error
from .functions import FunctionSession
from .loop import Session
from .mysql import MysqlSession
from .opening import opened
from .postgres import PostgresSession
from .sqlite import SqliteSession
from .steps import Pauses


class Connection(Protocol):
    """A connection of psycopg, PyMySQL or sqlite3, or ``django.db.connection``."""

    def cursor(self) -> Any: ...


class Engine(Protocol):
    """An engine of SQLAlchemy."""

    @property
    def url(self) -> Any: ...


class Pool(Protocol):
    """A pool of psycopg_pool."""

    def getconn(self, timeout: float | None = None) -> Any: ...


#: A URL, the path of an SQLite file, a connection, a pool or an engine, of which only the place is
#: read, or a function that opens connections.
Source: TypeAlias = str | os.PathLike[str] | Connection | Engine | Pool | Callable[[], Any]

NOT_READ = (
    "the URL is not one that can be read: special characters of its user and its password are "
    "written as %XX, as by urllib.parse.quote(password, safe='')"
)
NO_COROUTINE = (
    "the sessions of the locks belong to threads: pass a URL, or a function that returns a "
    "connection of psycopg, PyMySQL, mysqlclient or sqlite3, not a coroutine"
)
NAME = "rowlock"


@dataclass(frozen=True)
class Place:
    """A database, and how its sessions are opened."""

    #: Equal for equal places.
    key: Hashable
    #: Returns a session with this patience. It opens no connection yet.
    session: Callable[[float], Session]
    #: Opens a connection that receives notifications of releases, or returns none.
    listen: Callable[[], Any] | None = None
    #: Calls with equal sources find the same sessions.
    is_shared: bool = True

    def polls(self) -> Pauses:
        """Returns the pauses of a waiter: longer ones where releases are notified."""
        return Pauses(0.008, 1.0, 1.25) if self.listen is None else Pauses(0.02, 1.0)


def place_of(source: Source) -> Place:
    """Returns the place of a source. Raises :class:`TypeError` for one that is not known."""
    if isinstance(source, str):
        return _of_url(source)
    if isinstance(source, os.PathLike):
        return _of_file(os.fsdecode(source))
    thing: Any = source
    kind = type(source).__module__.split(".")[0]
    if kind == "psycopg_pool":
        return _of_pool(thing)
    if hasattr(source, "sync_engine"):  # Of SQLAlchemy, with a driver for an event loop.
        return _of_url(thing.sync_engine.url.render_as_string(hide_password=False))
    if kind == "sqlalchemy" and hasattr(source, "url"):
        return _of_engine(thing)
    if hasattr(source, "settings_dict") and hasattr(source, "get_new_connection"):
        return _of_django(thing)
    if callable(source) and not hasattr(source, "cursor"):
        if inspect.iscoroutinefunction(source):
            raise TypeError(NO_COROUTINE)
        return _of_function(_hashable(source), source, is_shared=False)
    return _of_connection(source)


def driver_of(thing: object) -> str:
    """Returns the name of the driver that a connection or a cursor belongs to."""
    for base in type(thing).__mro__:
        name = base.__module__.split(".")[0]
        if name in ("psycopg", "pymysql", "MySQLdb", "sqlite3", "aiomysql", "asyncmy", "aiosqlite"):
            return name
    raise TypeError(
        f"{type(thing).__module__}.{type(thing).__qualname__} is not known: use psycopg 3, "
        "PyMySQL, mysqlclient or sqlite3, a URL, or a function that connects. In place of a "
        "wrapper, pass the driver's own connection or cursor. SQLAlchemy has a cursor as "
        "session.connection().connection.cursor()"
    )


def _of_connection(source: Any) -> Place:
    driver = driver_of(source)
    if driver == "psycopg":
        parameters: dict[str, Any] = source.info.get_parameters()
        return _of_postgres(parameters | {"password": source.info.password or None})
    if driver == "pymysql":
        place = {name: getattr(source, name) for name in ("host", "port", "unix_socket", "user")}
        place |= {"password": source.password, "database": source.db}
        # PyMySQL by itself encrypts if the server can; a context makes that a condition.
        if getattr(source, "_ssl_required", source.ssl):
            place["ssl"] = source.ctx
        return _of_mysql(place)
    if driver == "sqlite3":
        return _of_file(_file_of(source))
    if driver == "MySQLdb":
        raise TypeError(
            "a connection of mysqlclient does not tell its password: "
            "use a URL, or a function that connects"
        )
    raise TypeError(f"a connection of {driver} cannot be passed: {NO_COROUTINE}")


def _file_of(connection: sqlite3.Connection) -> str:
    cursor = connection.cursor()
    cursor.row_factory = None
    rows = cursor.execute("PRAGMA database_list").fetchall()
    files = [row[2] for row in rows if row[1] == "main"]
    if not files or not files[0]:
        raise Error("a database in memory has one connection: use a file for its locks")
    return str(files[0])


def _of_pool(pool: Any) -> Place:
    """The connections of a pool are its application's. What its ``configure`` sets is not set."""
    conninfo, kwargs = pool.conninfo, pool.kwargs
    if callable(conninfo) or callable(kwargs):
        raise TypeError(
            "a pool whose parameters are functions cannot be passed: "
            "pass a function that opens a connection of psycopg"
        )
    return _of_postgres({"conninfo": conninfo} | (kwargs or {}))


def _of_engine(engine: Any) -> Place:
    """The sessions are opened as the engine opens its connections, beside its pool."""

    def connect() -> Any:
        loan = engine.pool.recreate().connect()
        connection = loan.driver_connection
        loan.detach()  # Which leaves it open.
        return connection

    return _of_function(engine, connect)


def _of_django(wrapper: Any) -> Place:
    def connect() -> Any:
        return wrapper.get_new_connection(wrapper.get_connection_params())

    names = ("ENGINE", "NAME", "HOST", "PORT", "USER")
    place = tuple(str(wrapper.settings_dict.get(name)) for name in names)
    return _of_function(("django", wrapper.alias, place), connect)


def _of_function(key: Hashable, connect: Callable[[], Any], *, is_shared: bool = True) -> Place:
    return Place(key, lambda patience: FromFunction(connect, patience), is_shared=is_shared)


class FromFunction:
    """A session over a function that connects. Its first connection tells the driver."""

    def __init__(self, connect: Callable[[], Any], patience: float) -> None:
        self.patience = patience
        self.listener: Any = None
        self._connect = connect
        self._session: Session | None = None

    def send(self, kind: str, requests: Any) -> list[Any]:
        if self._session is None:
            self._session = self._opened()
        return self._session.send(kind, requests)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _opened(self) -> Session:
        first: list[Any] = [opened(self._called)]
        driver = driver_of(first[0])
        if driver == "sqlite3":
            # Its connection may belong to one thread, or commit nothing by itself.
            file = _file_of(first[0])
            first[0].close()
            return SqliteSession(lambda: _sqlite(file), self.patience)
        if driver not in _SESSIONS:
            raise TypeError(f"a connection of {driver} cannot be used: {NO_COROUTINE}")

        def connect() -> Any:
            connection = first.pop() if first else self._called()
            if driver == "psycopg":
                prepare(connection, self.patience)
            else:
                connection.autocommit(True)
            return connection

        return _SESSIONS[driver](connect, self.patience)

    def _called(self) -> Any:
        connection = self._connect()
        if inspect.isawaitable(connection):
            if inspect.iscoroutine(connection):
                connection.close()
            raise TypeError(NO_COROUTINE)
        return connection


_SESSIONS: dict[str, type[FunctionSession]] = {
    "psycopg": PostgresSession,
    "pymysql": MysqlSession,
    "MySQLdb": MysqlSession,
}


def _of_url(text: str) -> Place:
    scheme, _, rest = text.partition(":")
    database = scheme.lower().split("+")[0]
    if database in ("postgres", "postgresql"):
        if re.split("[/?#]", rest.removeprefix("//"), maxsplit=1)[0].count("@") > 1:
            raise ValueError(NOT_READ)  # libpq would show a part of the password as the host.
        return _of_postgres({"conninfo": f"postgresql:{rest}"})
    if database in ("mysql", "mariadb"):
        return _of_mysql(_mysql_place(text))
    if database == "sqlite":
        file = unquote(rest.removeprefix("//").split("?", 1)[0])
        if "+" not in scheme:
            return _of_file(file)
        # In SQLAlchemy's URL of a driver, a path after three slashes is relative.
        if rest.startswith("///"):
            return _of_file(file.removeprefix("/"))
    raise ValueError("the URL has to begin with postgres://, mysql://, mariadb:// or sqlite:")


def _of_postgres(place: dict[str, Any]) -> Place:
    def session(patience: float) -> Session:
        def connect() -> Any:
            connection = _psycopg(place, patience)
            prepare(connection, patience)
            return connection

        return PostgresSession(connect, patience)

    return Place(_key("postgres", place), session, lambda: _listening(place))


def _of_mysql(place: dict[str, Any]) -> Place:
    _mysql_driver()  # Raises an error if none is installed.

    def session(patience: float) -> Session:
        return MysqlSession(lambda: _mysql(patience, place), patience)

    return Place(_key("mysql", place), session)


def _of_file(file: str) -> Place:
    if file in ("", ":memory:"):
        raise Error("a database in memory has one connection: use a file for its locks")
    key = ("sqlite", os.path.abspath(file))
    return Place(key, lambda patience: SqliteSession(lambda: _sqlite(file), patience))


def _key(database: str, place: dict[str, Any]) -> Hashable:
    return database, tuple(sorted((name, _hashable(value)) for name, value in place.items()))


def _hashable(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) else id(value)


def _psycopg(place: dict[str, Any], patience: float = 5.0, **more: Any) -> Any:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    # A renewal leaves time for another one on a new connection. libpq waits for 2 s at least.
    timeout = math.ceil(max(2.0, patience))
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


def _listening(place: dict[str, Any]) -> Any:
    """Opens a connection for notifications, or returns none behind a pooler that shares sessions.

    It asks for a setting of its own, which such a pooler rejects or omits.
    """
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(place.get("conninfo") or "").get("options")
    options = f"{place.get('options') or given or ''} -c rowlock.own_session=on"
    try:
        connection = _psycopg(place, options=options, autocommit=True)
    except psycopg.OperationalError as error:
        if "unsupported startup parameter" in str(error):
            return None
        raise
    row = connection.execute("SELECT current_setting('rowlock.own_session', true)").fetchone()
    if row is None or row[0] != "on":
        connection.close()
        return None
    return connection


#: Parameters that concern texts and results of the application alone.
_NOT_NEEDED = {
    "charset", "collation", "use_unicode", "binary_prefix", "local_infile", "autocommit",
    "connect_timeout", "read_timeout", "write_timeout", "timezone",
}  # fmt: skip


def _mysql_place(text: str) -> dict[str, Any]:
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


def _mysql_driver() -> Any:
    try:
        import pymysql
    except ImportError:
        import MySQLdb

        return MySQLdb
    return pymysql


def _mysql(patience: float, place: dict[str, Any]) -> Any:
    driver = _mysql_driver()
    place = {name: value for name, value in place.items() if value is not None}
    tls = {name[4:]: place.pop(name) for name in list(place) if name.startswith("ssl_")}
    silence = math.ceil(patience)
    settings: dict[str, Any] = {
        "connect_timeout": silence,
        "read_timeout": silence,
        "write_timeout": silence,
        "charset": "utf8mb4",
        "autocommit": True,
    }
    if driver.__name__ == "pymysql":
        settings |= _pymysql_tls(tls) | {"program_name": NAME}
    elif tls:
        files = {name: tls[name] for name in ("ca", "cert", "key") if name in tls}
        settings |= {"ssl_mode": _mode(tls)} | ({"ssl": files} if files else {})
    return driver.connect(**(settings | place))


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


def _sqlite(file: str) -> sqlite3.Connection:
    # The threads of the library use it one after the other. It creates no file.
    uri = f"file:{file.replace('%', '%25').replace('?', '%3f').replace('#', '%23')}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=0.05, check_same_thread=False)
