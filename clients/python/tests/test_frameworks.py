"""Pools, engines and frameworks as sources: their place is read, and their connections are left."""

from __future__ import annotations

import asyncio
import importlib.util
import uuid
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
from conftest import MYSQL, POSTGRES, Database, acquired, eventually, refused
from psycopg.rows import dict_row
from test_sources import mysql_place

import rowlock
import rowlock.aio
from rowlock import mysql
from rowlock.sources import place_of

psycopg_pool: Any = pytest.importorskip("psycopg_pool")
sqlalchemy: Any = pytest.importorskip("sqlalchemy")
django_db: Any = pytest.importorskip("django.db")


def holds_and_renews(source: Any, db: Database) -> None:
    """Holds a key until it has been renewed, beside the program."""
    with rowlock.lock(source, "k", lease=6, label="python") as lease:
        sent = lease._state.sent
        eventually(lambda: lease._state.sent > sent)
        assert not lease.lost
        assert refused(rowlock.try_acquire(db.url, "k")).by == "python"
        assert db.run("acquire", "k").returncode == 75
    assert db.show("k")["status"] == "S"


def sqlalchemy_url(db: Database, drivers: dict[str, str]) -> str:
    scheme, rest = db.url.split(":", 1)
    if db.name == "sqlite":  # A path after four slashes is absolute.
        return f"sqlite+{drivers['sqlite']}:///{rest}"
    scheme = {"postgres": "postgresql"}.get(scheme, scheme)
    return f"{scheme}+{drivers[db.name]}:{rest}"


SYNC = {"sqlite": "pysqlite", "postgres": "psycopg", "mysql": "pymysql", "mariadb": "pymysql"}
ASYNC = {"sqlite": "aiosqlite", "postgres": "psycopg", "mysql": "aiomysql", "mariadb": "asyncmy"}


def test_an_engine_of_sqlalchemy(db: Database) -> None:
    engine = sqlalchemy.create_engine(sqlalchemy_url(db, SYNC), pool_size=1, max_overflow=0)
    with engine.connect():  # Its pool has no connection left.
        holds_and_renews(engine, db)
    assert engine.pool.checkedin() == 1
    with engine.begin() as connection, rowlock.lock(engine, "k") as lease:
        if db.name == "sqlite":
            connection.exec_driver_sql("BEGIN")
        cursor = connection.connection.cursor()
        lease.confirm(cursor)
        connection.commit()
    assert rowlock.sources.place_of(engine).key is engine


def test_an_engine_of_sqlalchemy_for_event_loops(db: Database) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(sqlalchemy_url(db, ASYNC))
    holds_and_renews(engine, db)


@POSTGRES
def test_a_pool_of_psycopg_keeps_its_connections(db: Database) -> None:
    with psycopg_pool.ConnectionPool(db.url, min_size=1, max_size=1, open=True) as pool:
        pool.wait()
        with pool.connection():
            holds_and_renews(pool, db)
        assert pool.get_stats()["pool_available"] == 1
        assert pool.get_stats()["connections_num"] == 1
    asynchronous = psycopg_pool.AsyncConnectionPool(db.url, open=False)
    holds_and_renews(asynchronous, db)


@POSTGRES
def test_a_pool_whose_rows_are_dictionaries_is_notified_of_releases(db: Database) -> None:
    kwargs = {"row_factory": dict_row}
    place = place_of(psycopg_pool.ConnectionPool(db.url, kwargs=kwargs, open=False))
    assert place.listen is not None
    connection = place.listen()
    assert connection is not None
    connection.close()


@POSTGRES
def test_a_function_that_returns_the_connections_of_a_pool_is_refused(db: Database) -> None:
    """Its place in the pool would be lost."""
    with psycopg_pool.ConnectionPool(db.url, min_size=1, max_size=1, open=True) as pool:
        with pytest.raises(TypeError, match="pass the pool itself"):
            rowlock.connect(pool.getconn).lock("k").try_acquire()
        with pool.connection():
            holds_and_renews(pool, db)


def test_a_database_of_django(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.utils.connection import ConnectionProxy

    connections = of_django(db, monkeypatch)
    holds_and_renews(connections["default"], db)
    holds_and_renews(ConnectionProxy(connections, "default"), db)


@POSTGRES
def test_a_pool_of_django_keeps_its_connections(db: Database) -> None:
    from django.conf import settings

    if not settings.configured:
        settings.configure(USE_TZ=True)
    own = django_settings(db) | {"OPTIONS": {"pool": {"min_size": 1, "max_size": 1}}}
    connections = django_db.utils.ConnectionHandler({"default": own})
    wrapper: Any = connections["default"]
    try:
        holds_and_renews(wrapper, db)
        with wrapper.cursor() as cursor:
            cursor.execute("SELECT 1")
        wrapper.close()
        assert wrapper.pool.get_stats()["pool_available"] == 1
    finally:
        wrapper.close_pool()


@POSTGRES
def test_a_role_that_django_assumes_is_that_of_the_sessions(db: Database) -> None:
    from django.conf import settings

    if not settings.configured:
        settings.configure(USE_TZ=True)
    role = f"rowlock_{uuid.uuid4().hex}"
    db.execute(f"CREATE ROLE {role}")
    try:
        own = django_settings(db) | {"OPTIONS": {"assume_role": role}}
        connections = django_db.utils.ConnectionHandler({"default": own})
        with pytest.raises(rowlock.Error, match="permission denied for table t_resource_lock"):
            rowlock.try_acquire(connections["default"], "k")
        db.execute(f"GRANT SELECT, INSERT, UPDATE ON t_resource_lock TO {role}")
        with rowlock.lock(connections["default"], "k"):
            assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"
    finally:
        db.execute(f"DROP OWNED BY {role}")
        db.execute(f"DROP ROLE {role}")


def of_django(db: Database, monkeypatch: pytest.MonkeyPatch) -> Any:
    from django.conf import settings

    if not settings.configured:
        settings.configure(USE_TZ=True)
    # Without mysqlclient, PyMySQL takes its place.
    if db.name in ("mysql", "mariadb") and importlib.util.find_spec("MySQLdb") is None:
        monkeypatch.setattr(pymysql, "version_info", (2, 2, 1, "final", 0))
        pymysql.install_as_MySQLdb()
    return django_db.utils.ConnectionHandler({"default": django_settings(db)})


def source_of(kind: str, db: Database, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What opens connections of the application's own, without a limit, or the URL."""
    if kind == "engine":
        return sqlalchemy.create_engine(sqlalchemy_url(db, SYNC))
    if kind == "django":
        return of_django(db, monkeypatch)["default"]
    if kind == "function" and db.name == "postgres":
        return lambda: psycopg.connect(db.url)
    if kind == "function":
        return lambda: pymysql.connect(**mysql_place(db))
    return db.url


def django_settings(db: Database) -> dict[str, Any]:
    if db.name == "sqlite":
        file = db.url.removeprefix("sqlite:")
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": file}
    url = urlsplit(db.url)
    engine = "postgresql" if db.name == "postgres" else "mysql"
    return {
        "ENGINE": f"django.db.backends.{engine}", "NAME": url.path[1:], "HOST": url.hostname,
        "PORT": str(url.port), "USER": url.username, "PASSWORD": url.password or "",
    }  # fmt: skip


@POSTGRES
def test_what_is_not_possible_is_told(db: Database) -> None:
    async def connected() -> Any: ...

    for source in (connected, lambda: connected()):
        with pytest.raises((TypeError, rowlock.Unavailable), match="not a coroutine"):
            rowlock.try_acquire(source, "k")
    with pytest.raises(TypeError, match="is not known"):
        rowlock.try_acquire(7, "k")  # type: ignore[arg-type]
    for file in ("sqlite:", "sqlite::memory:"):
        with pytest.raises(rowlock.Error, match="in memory"):
            rowlock.try_acquire(file, "k")
    with pytest.raises(rowlock.Unavailable, match='invalid URI query parameter: "sslmod"'):
        rowlock.lock(f"{db.url}?sslmod=require", "k").acquire(wait=5)


@MYSQL
def test_parameters_of_a_url_of_mysql(db: Database) -> None:
    for parameters in ("charset=utf8mb4", "ssl-mode=PREFERRED", "ssl_disabled=true"):
        with rowlock.lock(f"{db.url}?{parameters}", "k"):
            pass
    with pytest.raises(ValueError, match=r"not known \(sql_mode\)"):
        rowlock.try_acquire(f"{db.url}?sql-mode=ansi&charset=utf8", "k")
    with pytest.raises((ValueError, rowlock.Unavailable), match="ssl-mode SOME"):
        rowlock.try_acquire(f"{db.url}?ssl-mode=some", "k")


@pytest.mark.parametrize("db", ["mysql"], indirect=True)
def test_a_url_asks_for_encryption(db: Database) -> None:
    def cipher(parameters: str) -> str:
        place = mysql.place_of(f"{db.url}?{parameters}")
        connection = mysql.connect(30.0, place)
        cursor = connection.cursor()
        cursor.execute("SHOW STATUS LIKE 'Ssl_cipher'")
        found = str(cursor.fetchone()[1])
        connection.close()
        return found

    assert cipher("ssl-mode=REQUIRED")
    assert not cipher("ssl-mode=DISABLED")
    with pytest.raises(Exception, match="certificate verify failed"):
        cipher("ssl-mode=VERIFY_CA")


@pytest.mark.parametrize("driver", ["psycopg", "aiomysql", "asyncmy", "aiosqlite"])
def test_a_cursor_of_an_event_loop_confirms(db: Database, driver: str) -> None:
    async def work() -> None:
        connection = await async_connection(driver, db)
        db.execute("CREATE TABLE work (token BIGINT)")
        lease = await rowlock.aio.try_acquire(db.url, "k")
        assert isinstance(lease, rowlock.aio.Lease)
        cursor = await cursor_of(connection)
        await begin(driver, cursor)
        await lease.confirm(cursor)
        await cursor.execute(f"INSERT INTO work VALUES ({lease.token})")
        await connection.commit()
        assert db.run("release", "k", "--force").returncode == 0
        await begin(driver, cursor)
        with pytest.raises(rowlock.Lost):
            await lease.confirm(cursor)
        await connection.rollback()
        assert [row[0] for row in db.execute("SELECT token FROM work")] == [lease.token]
        await close(connection)

    asyncio.run(work())


@pytest.mark.parametrize("driver", ["psycopg", "aiomysql", "asyncmy", "aiosqlite"])
def test_a_cursor_that_is_awaited_confirms_no_lease_of_threads(db: Database, driver: str) -> None:
    async def work() -> None:
        connection = await async_connection(driver, db)
        cursor = await cursor_of(connection)
        await begin(driver, cursor)
        told = r"a lease of rowlock\.aio confirms with it, by `await"
        with rowlock.lock(db.url, "k") as lease, pytest.raises(TypeError, match=told):
            lease.confirm(cursor)
        await close(connection)

    asyncio.run(work())


async def async_connection(driver: str, db: Database) -> Any:
    known = {"sqlite": ["aiosqlite"], "postgres": ["psycopg"]}
    if driver not in known.get(db.name, ["aiomysql", "asyncmy"]):
        pytest.skip("another database")
    module: Any = pytest.importorskip(driver)
    if driver == "aiosqlite":
        return await module.connect(db.url.removeprefix("sqlite:"))
    if driver == "psycopg":
        return await module.AsyncConnection.connect(db.url)
    url = urlsplit(db.url)
    return await module.connect(
        host=url.hostname, port=url.port, user=url.username, password=url.password or "",
        db=url.path[1:],
    )  # fmt: skip


async def cursor_of(connection: Any) -> Any:
    cursor = connection.cursor()
    return await cursor if asyncio.iscoroutine(cursor) else cursor


async def close(connection: Any) -> None:
    closed = connection.close()
    if asyncio.iscoroutine(closed):
        await closed


async def begin(driver: str, cursor: Any) -> None:
    if driver != "psycopg":
        await cursor.execute("BEGIN")


def test_sources_of_one_place_share_sessions(db: Database) -> None:
    lease = acquired(rowlock.try_acquire(db.url, "a"))
    other = acquired(rowlock.connect(db.url).lock("b").acquire())
    assert lease._on is other._on
    lease.release()
    other.release()
