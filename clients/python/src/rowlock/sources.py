"""Where sessions lead: a URL, a connection, a pool, or a function that connects."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sqlite3
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from urllib.parse import unquote

from . import deadlines, mysql, postgres, sqlite
from .errors import Error
from .functions import FunctionSession
from .loop import Session
from .opening import NOT_READ, Opening, opened
from .protocol import PATIENCE
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

NO_COROUTINE = (
    "the sessions of the locks belong to threads: pass a URL, or a function that returns a "
    "connection of psycopg, PyMySQL, mysqlclient or sqlite3, not a coroutine"
)


@dataclass(frozen=True)
class Place:
    """A database, and how its sessions are opened."""

    #: Equal for equal places.
    key: Hashable
    #: Returns a session. It opens no connection yet.
    session: Callable[[], Session]
    #: Opens a connection that receives notifications of releases, or returns none.
    listen: Callable[[], Any] | None = None
    #: Calls with equal sources find the same sessions.
    is_shared: bool = True
    #: ``postgres``, ``mysql`` or ``sqlite``, or none if only a connection tells.
    kind: str | None = None

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
    if hasattr(source, "render_as_string"):  # A URL of SQLAlchemy.
        return _of_url(thing.render_as_string(hide_password=False))
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
        return _of_file(sqlite.file_of(source))
    if driver == "MySQLdb":
        raise TypeError(
            "a connection of mysqlclient does not tell its password: "
            "use a URL, or a function that connects"
        )
    raise TypeError(f"a connection of {driver} cannot be passed: {NO_COROUTINE}")


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
        # By themselves they wait for long, or without a limit.
        limits = {"mysql": mysql.limits(PATIENCE), "postgresql": {"connect_timeout": int(PATIENCE)}}
        parameters = limits.get(wrapper.vendor, {}) | wrapper.get_connection_params()
        options = wrapper.settings_dict.get("OPTIONS", {})
        # The connections of a pool are those of requests.
        if options.get("pool"):
            connection = wrapper.Database.connect(**parameters)
        else:
            connection = wrapper.get_new_connection(parameters)
        if role := options.get("assume_role"):
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('role', %s, false)", [role])
        return connection

    names = ("ENGINE", "NAME", "HOST", "PORT", "USER")
    place = tuple(str(wrapper.settings_dict.get(name)) for name in names)
    return _of_function(("django", wrapper.alias, place), connect)


def _of_function(key: Hashable, connect: Callable[[], Any], *, is_shared: bool = True) -> Place:
    return Place(key, lambda: FromFunction(connect), is_shared=is_shared)


class FromFunction:
    """A session over a function that connects. Its first connection tells the driver."""

    patience = PATIENCE
    listener: Any = None

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._opening = Opening(self._call)
        self._session: Session | None = None

    def send(self, kind: str, requests: Any) -> list[Any]:
        if self._session is None:
            self._session = self._opened()
        self._session.patience = self.patience
        return self._session.send(kind, requests)

    def close(self) -> None:
        self._opening.leave()
        if self._session is not None:
            self._session.close()

    def _opened(self) -> Session:
        first: list[Any] = [opened(lambda: self._opening.connection(self.patience))]
        if isinstance(first[0], str):
            file = first[0]
            return sqlite.SqliteSession(lambda: sqlite.connect(file))
        driver = driver_of(first[0])
        if driver not in _SESSIONS:
            raise TypeError(f"a connection of {driver} cannot be used: {NO_COROUTINE}")
        if (pool := getattr(first[0], "_pool", None)) is not None:
            pool.putconn(first[0])
            raise TypeError("a connection of a pool belongs to the pool: pass the pool itself")
        kind, prepare = _SESSIONS[driver]

        def connect(patience: float) -> Any:
            connection = first.pop() if first else self._call(patience)
            prepare(connection, patience)
            return connection

        return kind(connect)

    def _call(self, _: float) -> Any:
        """Returns a connection, or the file of one of SQLite, which may belong to its thread."""
        connection = self._connect()
        if inspect.isawaitable(connection):
            if inspect.iscoroutine(connection):
                connection.close()
            raise TypeError(NO_COROUTINE)
        if isinstance(connection, sqlite3.Connection):
            with contextlib.closing(connection):
                return sqlite.file_of(connection)
        return connection


#: How each driver's connections are used, and what makes them connections for leases.
_SESSIONS: dict[str, tuple[type[FunctionSession], Callable[[Any, float], None]]] = {
    "psycopg": (postgres.PostgresSession, deadlines.prepare),
    "pymysql": (mysql.MysqlSession, mysql.prepare),
    "MySQLdb": (mysql.MysqlSession, mysql.prepare),
}


def _of_url(text: str) -> Place:
    scheme, _, rest = text.partition(":")
    database = scheme.lower().split("+")[0]
    if database in ("postgres", "postgresql"):
        if re.split("[/?#]", rest.removeprefix("//"), maxsplit=1)[0].count("@") > 1:
            raise ValueError(NOT_READ)  # libpq would show a part of the password as the host.
        return _of_postgres({"conninfo": f"postgresql:{rest}"})
    if database in ("mysql", "mariadb"):
        return _of_mysql(mysql.place_of(text))
    if database == "sqlite":
        file = unquote(rest.removeprefix("//").split("?", 1)[0])
        if "+" not in scheme:
            return _of_file(file)
        # In SQLAlchemy's URL of a driver, a path after three slashes is relative.
        if rest.startswith("///"):
            return _of_file(file.removeprefix("/"))
    raise ValueError("the URL has to begin with postgres://, mysql://, mariadb:// or sqlite:")


def _of_postgres(place: dict[str, Any]) -> Place:
    def connect(patience: float) -> Any:
        connection = postgres.connect(place, patience)
        deadlines.prepare(connection, patience)
        return connection

    key = _key("postgres", place)
    session = functools.partial(postgres.PostgresSession, connect)
    return Place(key, session, lambda: postgres.listening(place), kind="postgres")


def _of_mysql(place: dict[str, Any]) -> Place:
    mysql.driver()  # Raises an error if none is installed.
    session = functools.partial(mysql.MysqlSession, lambda patience: mysql.connect(patience, place))
    return Place(_key("mysql", place), session, kind="mysql")


def _of_file(file: str) -> Place:
    file = re.sub("^//+", "/", file)  # As in SQLAlchemy's sqlite:////FILE.
    if file in ("", ":memory:"):
        raise Error("a database in memory has one connection: use a file for its locks")
    file = os.path.abspath(file)  # The process may change its folder later.
    session = functools.partial(sqlite.SqliteSession, lambda: sqlite.connect(file))
    return Place(("sqlite", file), session, kind="sqlite")


def _key(database: str, place: dict[str, Any]) -> Hashable:
    return database, tuple(sorted((name, _hashable(value)) for name, value in place.items()))


def _hashable(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) else id(value)
