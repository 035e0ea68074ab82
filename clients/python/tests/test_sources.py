"""Where connections come from: functions, connections, URLs and files of every kind."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import ssl
import sys
import threading
import time
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import psycopg
import pymysql.cursors
import pytest
from conftest import MYSQL, POSTGRES, SERVERS, SQLITE, Database, acquired, eventually, refused
from fakes import acquiring, carry_out
from psycopg.rows import class_row, dict_row

import rowlock
import rowlock.aio
from rowlock import mysql, postgres, sources
from rowlock.errors import Outage
from rowlock.opening import Opening
from rowlock.protocol import Acquired, Granted, patience
from rowlock.sources import place_of
from rowlock.terms import Terms


@POSTGRES
def test_a_connection_may_have_begun_a_transaction(db: Database) -> None:
    def connect() -> Any:
        connection = psycopg.connect(db.url)
        connection.execute("SET lock_timeout = '7s'")
        return connection

    with rowlock.lock(connect, "k", lease=6) as lease:
        assert lease.owned()


@MYSQL
@pytest.mark.parametrize("chains", [False, True])
def test_a_transaction_of_what_opens_a_connection_is_ended(db: Database, chains: bool) -> None:
    """One that commits each statement by itself may still be in a transaction."""

    def connect() -> Any:
        connection = pymysql.connect(**mysql_place(db), autocommit=True)
        if chains:
            connection.cursor().execute("SET SESSION completion_type = 'CHAIN'")
        connection.begin()
        if chains:
            connection.commit()
        return connection

    with rowlock.lock(connect, "k") as lease:
        rows = db.execute("SELECT token FROM t_resource_lock WHERE lock_flag = 1")
        assert rows == ((lease.token,),)


@MYSQL
def test_a_claim_outwaits_a_transaction_that_creates_its_row(db: Database) -> None:
    """The server waits a second for it, which is the limit of other requests for a short lease."""
    session: Any = place_of(db.url).session()
    session.patience = patience(1)
    assert isinstance(carry_out(acquiring(Terms("k", label="x"), 60.0), session), Acquired)
    assert session._connection._read_timeout == 2
    session.patience = patience(1)
    session._cursor(session._connection)
    assert session._connection._read_timeout == 1
    session.close()


def mysql_place(db: Database) -> dict[str, Any]:
    url = urlsplit(db.url)
    return {
        "host": url.hostname,
        "port": url.port,
        "user": url.username,
        "password": url.password or "",
        "database": url.path[1:],
    }


def test_a_function_that_fails_for_a_while_is_waited_for(db: Database) -> None:
    tries = itertools.count()

    def open_connection() -> Any:
        if next(tries) < 3:
            raise ConnectionRefusedError("not yet")
        return db.connect()

    with pytest.raises(rowlock.Unavailable, match="not yet"):
        rowlock.try_acquire(open_connection, "k")
    with rowlock.lock(open_connection, "k", wait=30):
        assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"


def dictionaries(db: Database) -> Any:
    """A connection whose cursors return rows of another kind by default."""
    if db.name == "sqlite":
        connection = sqlite3.connect(db.url.removeprefix("sqlite:"))
        connection.row_factory = lambda cursor, row: {
            column[0]: value for column, value in zip(cursor.description, row, strict=True)
        }
        return connection
    if db.name == "postgres":
        return psycopg.connect(db.url, row_factory=dict_row)
    return pymysql.connect(**mysql_place(db), cursorclass=pymysql.cursors.DictCursor)


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_a_function_that_would_end_its_thread_ends_no_renewal(
    db: Database, error: type[BaseException]
) -> None:
    """As that of a portal, or of a library with a deadline, may do."""
    calls = itertools.count()

    def connect() -> Any:
        if next(calls) == 1:  # Of the session of the renewals.
            raise error
        return db.connect()

    def fail() -> Any:
        raise error

    with rowlock.lock(connect, "k", lease=6) as lease:
        sent = lease._state.sent
        eventually(lambda: lease._state.sent > sent or lease.lost)
        assert not lease.lost
    with pytest.raises(rowlock.Unavailable, match=error.__name__):
        rowlock.try_acquire(fail, "other")


def test_rows_of_another_kind(db: Database) -> None:
    connection = dictionaries(db)
    for source in (connection, lambda: dictionaries(db)):
        with rowlock.lock(source, "k", lease=4) as lease:
            cursor = connection.cursor()
            connection.execute("BEGIN") if db.name == "sqlite" else None
            lease.confirm(cursor)
            connection.commit()
            time.sleep(5)
            assert not lease.lost
    connection.close()


@POSTGRES
def test_a_function_that_is_awaited_is_refused(db: Database) -> None:
    """The sessions belong to threads, which await nothing."""

    async def open_connection() -> Any:
        return await psycopg.AsyncConnection.connect(db.url)

    async def run(connect: Any) -> None:
        async with rowlock.aio.lock(connect, "k"):
            pytest.fail("it is held")

    told = "pass a URL, or a function that returns a connection of psycopg"
    with pytest.raises(TypeError, match=told):
        asyncio.run(run(open_connection))
    with pytest.raises(TypeError, match=told):
        rowlock.try_acquire(open_connection, "k")
    # This one is known by its result alone.
    began = time.monotonic()
    with pytest.raises(rowlock.Unavailable, match=told):
        asyncio.run(run(lambda: open_connection()))
    assert time.monotonic() - began < 30


@MYSQL
def test_a_connection_that_decodes_no_text(db: Database) -> None:
    def open_connection() -> Any:
        return pymysql.connect(**mysql_place(db), use_unicode=False)

    with rowlock.lock(open_connection, "k", lease=4, label="ü") as lease:
        time.sleep(5)
        assert not lease.lost
        refusal = refused(rowlock.try_acquire(open_connection, "k"))
        assert (refusal.reason, refusal.by) == ("held", "ü")
    assert db.show("k")["status"] == "S"


@SQLITE
def test_a_plain_function_of_sqlite_is_renewed(db: Database) -> None:
    """Its connection may be used by the thread alone that has opened it."""
    file = db.url.removeprefix("sqlite:")
    lease = acquired(rowlock.try_acquire(lambda: sqlite3.connect(file), "k", lease=4))
    time.sleep(5)
    assert not lease.lost
    lease.release()
    assert db.show("k")["status"] == "S"


@SQLITE
@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has autocommit since Python 3.12")
def test_a_function_whose_connections_do_not_commit(db: Database) -> None:
    file = db.url.removeprefix("sqlite:")

    def open_connection() -> Any:
        options: dict[str, Any] = {"autocommit": False}
        return sqlite3.connect(file, **options)

    with rowlock.lock(open_connection, "k"):
        assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"


@SQLITE
def test_a_path(db: Database) -> None:
    with rowlock.lock(Path(db.url.removeprefix("sqlite:")), "k"):
        assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"


@SQLITE
def test_a_relative_path_leads_to_one_file(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session opens it, also after the process has changed its folder."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    place = sources.place_of("sqlite:locks.db")
    monkeypatch.chdir("elsewhere")
    terms, holder = Terms("k", label="x"), str(uuid.uuid4())
    (reply,) = place.session().send("claim", [(terms, holder)])
    assert isinstance(reply, Granted)
    assert place.key == sources.place_of(db.url).key
    assert db.show("k")["token"] == reply.claim.token


class Slow:
    """A function that connects when it is told to: each call returns its part of the outcomes."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = outcomes
        self.ready = [threading.Event() for _ in outcomes]
        self.calls = 0

    def __call__(self, *_: Any) -> Any:
        place, self.calls = self.calls, self.calls + 1
        self.ready[place].wait(60)
        if isinstance(outcome := self.outcomes[place], Exception):
            raise outcome
        return outcome

    def is_tried(self, opening: Opening) -> None:
        with pytest.raises(TimeoutError, match=r"no connection in 2\.0 s"):
            opening.connection(0.1)


def test_an_opening_that_outlasts_a_try_is_waited_for() -> None:
    slow = Slow(mock.Mock())
    opening = Opening(slow)
    slow.is_tried(opening)
    slow.ready[0].set()
    assert opening.connection(0.1) is slow.outcomes[0]
    assert slow.calls == 1
    assert not slow.outcomes[0].close.called


def test_an_opening_that_fails_after_a_try_fails_no_other() -> None:
    slow = Slow(OSError("it was silent"), mock.Mock())
    opening = Opening(slow)
    slow.is_tried(opening)
    slow.ready[0].set()
    slow.ready[1].set()
    assert opening.connection(0.1) is slow.outcomes[1]


def test_beside_an_opening_that_hangs_another_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rarely: a function without a limit leaves few threads in an outage of an hour."""
    slow = Slow(mock.Mock(), mock.Mock())
    opening = Opening(slow)
    slow.is_tried(opening)
    monkeypatch.setattr("rowlock.opening.PATIENCE", 0.0)
    slow.ready[1].set()
    assert opening.connection(0.1) is slow.outcomes[1]
    slow.ready[0].set()
    eventually(lambda: slow.outcomes[0].close.called)
    assert not slow.outcomes[1].close.called
    assert slow.calls == 2


def test_a_connection_that_comes_too_late_is_closed() -> None:
    slow = Slow(mock.Mock())
    opening = Opening(slow)
    slow.is_tried(opening)
    opening.leave()
    slow.ready[0].set()
    eventually(lambda: slow.outcomes[0].close.called)


def test_a_function_that_is_slower_than_a_try_holds_a_short_lease(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowlock.opening.PATIENCE", 600.0)  # A server under load may be slow.
    calls: list[str] = []

    def connect() -> Any:
        calls.append(threading.current_thread().name)
        time.sleep(2.2)
        return db.connect()

    session = place_of(connect).session()
    session.patience = patience(3)
    assert isinstance(carry_out(acquiring(Terms("k", lease=3), 60.0), session), Acquired)
    assert calls == ["rowlock opening"]
    session.close()


@SERVERS
def test_a_url_whose_opening_is_slow_is_tried_in_time(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the name of its host is not resolved: drivers have no limit to that."""
    module = postgres if db.name == "postgres" else mysql
    slow = Slow(None)
    connect: Any = module.connect

    def resolved(*given: Any) -> Any:
        slow()
        return connect(*(60.0 if isinstance(one, float) else one for one in given))

    monkeypatch.setattr(module, "connect", resolved)
    monkeypatch.setattr("rowlock.opening.PATIENCE", 600.0)  # A server under load may be slow.
    session = place_of(db.url).session()
    session.patience = patience(3)
    request = (Terms("k", label="x"), str(uuid.uuid4()))
    with pytest.raises(Outage) as raised:
        session.send("claim", [request])
    assert not raised.value.sent
    slow.ready[0].set()
    assert isinstance(carry_out(acquiring(Terms("k", label="x"), 60.0), session), Acquired)
    assert slow.calls == 1
    session.close()


@pytest.mark.parametrize("db", ["mysql"], indirect=True)
def test_leases_are_encrypted_like_the_connection_they_come_from(db: Database) -> None:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE

    def cipher(connection: Any) -> str:
        cursor = connection.cursor()
        cursor.execute("SHOW STATUS LIKE 'Ssl_cipher'")
        return str(cursor.fetchone()[1])

    connection: Any = pymysql.connect(**mysql_place(db), ssl=context)
    assert cipher(connection)
    session: Any = sources.place_of(connection).session()
    own = session._opening.connection(5.0)
    assert cipher(own)
    assert own.ctx is context  # Its certificates count: PyMySQL encrypts by itself, unverified.
    own.close()
    connection.close()


def test_no_message_has_a_password() -> None:
    for source in ("mysql://app:hush@db/app", "postgres://app:hush@[db/app"):
        raised: list[BaseException] = []
        for work in (
            lambda source=source: rowlock.try_acquire(source.replace("mysql:", "maria:"), "k"),
            lambda source=source: asyncio.run(rowlock.aio.try_acquire(source, "k")),
        ):
            try:
                work()
            except (rowlock.Error, ValueError) as error:
                raised.append(error)
        assert len(raised) == 2
        for one in raised:
            assert "hush" not in str(one)
            assert "hush" not in str(one.__cause__)


@pytest.mark.parametrize("scheme", ["mysql", "mariadb", "postgres", "postgresql+psycopg"])
@pytest.mark.parametrize("password", ["hush@hush", "hush/hush", "hush#hush", "hush?hush"])
def test_a_password_that_is_not_encoded_is_no_part_of_a_message(scheme: str, password: str) -> None:
    url = f"{scheme}://app:{password}@127.0.0.1:1/app"
    with pytest.raises((ValueError, rowlock.Unavailable)) as raised:
        rowlock.try_acquire(url, "k")
    shown = "".join(traceback.format_exception(raised.value))
    assert [line for line in shown.splitlines() if "hush" in line] == []


@POSTGRES
def test_a_cursor_whose_rows_are_objects_confirms(db: Database) -> None:
    @dataclass
    class Account:
        name: str

    with rowlock.lock(db.url, "k") as lease, psycopg.connect(db.url) as connection:
        lease.confirm(connection.cursor(row_factory=class_row(Account)))

    async def run() -> None:
        async with (
            rowlock.aio.lock(db.url, "k") as lease,
            await psycopg.AsyncConnection.connect(db.url) as connection,
        ):
            await lease.confirm(connection.cursor(row_factory=class_row(Account)))

    asyncio.run(run())


def test_a_url_of_sqlalchemy(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, rest = db.url.split(":", 1)
    drivers = {"postgres": "psycopg", "mysql": "pymysql", "mariadb": "pymysql"}
    urls = [f"{scheme}+{drivers.get(db.name)}:{rest}"]
    if db.name == "sqlite":  # Its URL is another: a path after three slashes is relative.
        monkeypatch.chdir(Path(rest).parent)
        urls = [f"sqlite+pysqlite:///{rest}", f"sqlite+pysqlite:///{Path(rest).name}"]
    for url in urls:
        with rowlock.lock(url, "k"):
            assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"


@pytest.mark.parametrize("label", ["x" * 46, "a\0b", "a\nb"])
def test_a_label_is_checked_before_anything_is_sent(label: str) -> None:
    for make in (rowlock.lock, rowlock.aio.lock, rowlock.job):
        with pytest.raises(ValueError, match="label"):
            make("postgres:///nowhere", "k", label=label)


def test_a_label_of_the_longest_length(db: Database) -> None:
    with rowlock.lock(db.url, "k", label="ü" * 45):
        assert refused(rowlock.try_acquire(db.url, "k")).by == "ü" * 45


class Wrapper:
    """Wraps a connection or a cursor of a driver, as those of Django do."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


def test_a_wrapper_is_told_from_what_it_wraps(db: Database) -> None:
    told = r"Wrapper is not known: .* pass the driver's own connection or cursor\. SQLAlchemy has"
    connection = db.connect()
    with pytest.raises(TypeError, match=told):
        rowlock.try_acquire(Wrapper(connection), "k")
    with rowlock.lock(db.url, "k") as lease, pytest.raises(TypeError, match=told):
        lease.confirm(Wrapper(connection.cursor()))
    connection.close()


def test_a_confirmation_takes_a_cursor(db: Database) -> None:
    connection = db.connect()
    with (
        rowlock.lock(db.url, "k") as lease,
        pytest.raises(TypeError, match=r"connection\.cursor\(\)"),
    ):
        lease.confirm(connection)
    connection.close()
