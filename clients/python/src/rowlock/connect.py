"""Where a lease's own connections lead: a URL, a function that connects, or a connection."""

from __future__ import annotations

import math
import os
import re
import socket
import sqlite3
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from .errors import Error
from .functions import (
    MYSQL_CHANGES,
    MYSQL_CLAIM,
    POSTGRES_CHANGES,
    POSTGRES_CLAIM,
    FunctionSession,
    mysql_meaning,
    postgres_meaning,
)
from .opening import opened
from .protocol import LABEL, Claim, Terms, patience
from .sqlite import SqliteSession

NOT_READ = (
    "the URL is not one that can be read: special characters of its user and its password are "
    "written as %XX, as by urllib.parse.quote(password, safe='')"
)
#: A URL, a connection (of which only the place is read), or a function that opens connections.
Source = Any


class Session(Protocol):
    """Sends requests, one at a time."""

    def claim(self, terms: Terms, holder: str) -> Any: ...
    def change(self, change: str, claim: Claim, *arguments: Any) -> str: ...
    def close(self) -> None: ...


def default_label() -> str:
    """The host's name and the number of the process, as the other clients write it."""
    return f"{socket.gethostname()}/{os.getpid()}"[:LABEL]


def session(source: Source, lease: float) -> Session:
    """Returns a session with connections of its own. None is opened yet."""
    if is_function(source):
        return FromFunction(source, lease)
    return _session(*opener(source, lease))


def _session(driver: str, connect: Callable[[], Any]) -> Session:
    # Cursors are the driver's plain ones, whatever rows a connection makes by default.
    if driver == "sqlite3":
        return SqliteSession(connect)
    if driver == "psycopg":
        claim, changes = POSTGRES_CLAIM, POSTGRES_CHANGES
        return FunctionSession(connect, claim, changes, postgres_meaning, _psycopg_cursor)
    cursor = _pymysql_cursor if driver == "pymysql" else _mysqldb_cursor
    return FunctionSession(connect, MYSQL_CLAIM, MYSQL_CHANGES, mysql_meaning, cursor)


class FromFunction:
    """A session over a function that connects. Its first connection tells the driver."""

    def __init__(self, connect: Callable[[], Any], lease: float) -> None:
        self._connect = connect
        self._lease = lease
        self._session: Session | None = None

    def claim(self, terms: Terms, holder: str) -> Any:
        return self._opened().claim(terms, holder)

    def change(self, change: str, claim: Claim, *arguments: Any) -> str:
        return self._opened().change(change, claim, *arguments)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _opened(self) -> Session:
        if self._session is None:
            first: list[Any] = [opened(self._connect)]
            driver = driver_of(first[0])
            if driver == "sqlite3":
                # Its connection may belong to one thread, or commit nothing by itself.
                self._session = _session(*opener(first[0], self._lease))
                first[0].close()
                return self._session

            def connect() -> Any:
                connection = first.pop() if first else self._connect()
                if driver == "psycopg":
                    _prepare_psycopg(connection, self._lease)
                else:
                    connection.autocommit(True)
                return connection

            self._session = _session(driver, connect)
        return self._session


def is_function(source: Source) -> bool:
    return callable(source) and not hasattr(source, "cursor")


def driver_of(thing: object) -> str:
    """Returns the name of the driver that a connection or a cursor belongs to."""
    for base in type(thing).__mro__:
        name = base.__module__.split(".")[0]
        if name in ("psycopg", "pymysql", "MySQLdb", "sqlite3"):
            return name
    raise TypeError(
        f"{type(thing).__module__}.{type(thing).__qualname__} is not known: use psycopg 3, "
        "PyMySQL, mysqlclient or sqlite3, a URL, or a function that connects. In place of a "
        "wrapper, pass the driver's own connection or cursor. Django has them as "
        "connection.connection, after connection.ensure_connection(), and "
        "connection.connection.cursor()"
    )


def opener(source: Source, lease: float) -> tuple[str, Callable[[], Any]]:
    """Returns the driver's name and a function that opens a connection that commits by itself."""
    if isinstance(source, str):
        return _of_url(source, lease)
    if isinstance(source, os.PathLike):
        file = os.fsdecode(source)
        return "sqlite3", lambda: _sqlite(file)
    driver = driver_of(source)
    if driver == "psycopg":
        parameters = psycopg_place(source)
        return driver, lambda: _psycopg(lease, **parameters)
    if driver == "pymysql":
        place = {name: getattr(source, name) for name in ("host", "port", "unix_socket", "user")}
        place |= {"password": source.password, "database": source.db}
        # PyMySQL by itself encrypts if the server can; a context makes that a condition.
        if getattr(source, "_ssl_required", source.ssl):
            place["ssl"] = source.ctx
        return driver, lambda: _mysql(lease, **place)
    if driver == "sqlite3":
        cursor = source.cursor()
        cursor.row_factory = None
        rows = cursor.execute("PRAGMA database_list").fetchall()
        files = [row[2] for row in rows if row[1] == "main"]
        if not files or not files[0]:
            raise Error("a database in memory has one connection: use a file for its locks")
        return driver, lambda: _sqlite(files[0])
    raise TypeError(
        "a connection of mysqlclient does not tell its password: "
        "use a URL, or a function that connects"
    )


def psycopg_place(connection: Any) -> dict[str, Any]:
    """Returns what a connection was opened with."""
    parameters: dict[str, Any] = connection.info.get_parameters()
    parameters["password"] = connection.info.password or None
    return parameters


def postgres_url(text: str) -> str | None:
    """Returns the URL for libpq, without SQLAlchemy's name of a driver, or none for another."""
    scheme, _, rest = text.partition(":")
    if scheme.lower().split("+")[0] not in ("postgres", "postgresql"):
        return None
    if re.split("[/?#]", rest.removeprefix("//"), maxsplit=1)[0].count("@") > 1:
        raise ValueError(NOT_READ)  # libpq would show a part of the password as the host.
    return f"postgresql:{rest}"


def _of_url(text: str, lease: float) -> tuple[str, Callable[[], Any]]:
    if url := postgres_url(text):
        return "psycopg", lambda: _psycopg(lease, url)
    scheme = text.split(":", 1)[0].lower()
    if scheme.split("+")[0] in ("mysql", "mariadb"):
        place = _place(text)
        return _mysql_driver(), lambda: _mysql(lease, **place)
    if scheme == "sqlite":
        file = text[len("sqlite:") :].removeprefix("//").split("?", 1)[0]
        return "sqlite3", lambda: _sqlite(unquote(file))
    raise ValueError("the URL has to begin with postgres://, mysql://, mariadb:// or sqlite:")


def _place(text: str) -> dict[str, Any]:
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
    if others := dict(parse_qsl(url.query)):
        names = ", ".join(sorted(others))
        raise ValueError(f"the URL has parameters that are not known ({names}): pass a function")
    return place


def _psycopg(lease: float, *place: Any, **parameters: Any) -> Any:
    import psycopg

    try:
        connection = psycopg.connect(*place, **({"connect_timeout": 5} | parameters))
    except psycopg.ProgrammingError:  # Its message has the text, which may have a password.
        raise ValueError(NOT_READ) from None
    _prepare_psycopg(connection, lease)
    return connection


def _prepare_psycopg(connection: Any, lease: float) -> None:
    from .deadlines import prepare

    prepare(connection, patience(lease))


def plain_cursor(cursor: Any) -> Any:
    """Returns one of the same transaction whose rows are tuples, or none."""
    return _psycopg_cursor(cursor.connection) if driver_of(cursor) == "psycopg" else cursor


def _psycopg_cursor(connection: Any) -> Any:
    import psycopg

    return psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)


def _mysql_driver() -> str:
    try:
        import pymysql  # noqa: F401
    except ImportError:
        return "MySQLdb"
    return "pymysql"


def _pymysql_cursor(connection: Any) -> Any:
    from pymysql.cursors import Cursor

    return connection.cursor(Cursor)


def _mysqldb_cursor(connection: Any) -> Any:
    from MySQLdb.cursors import Cursor

    return connection.cursor(Cursor)


def _mysql(lease: float, **place: Any) -> Any:
    silence = math.ceil(patience(lease))
    place = {name: value for name, value in place.items() if value is not None}
    settings: dict[str, Any] = {
        "connect_timeout": 5,
        "read_timeout": silence,
        "write_timeout": silence,
    }
    settings |= {"charset": "utf8mb4", "autocommit": True} | place
    if _mysql_driver() == "MySQLdb":
        import MySQLdb

        return MySQLdb.connect(**settings)
    import pymysql

    return pymysql.connect(**settings)


def _sqlite(file: str) -> sqlite3.Connection:
    # The thread that renews and the one that ends the lease use it in turn. It creates no file.
    uri = f"file:{file.replace('%', '%25').replace('?', '%3f').replace('#', '%23')}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=0.05, check_same_thread=False)
