"""Servers that are silent or read-only: no call waits for long, and no lease is lost early."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import queue
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import psycopg
import pymysql
import pytest
from conftest import (
    POSTGRES,
    SERVERS,
    SQLITE,
    Database,
    acquired,
    end_sessions,
    eventually,
    refused,
)
from fakes import Fake, acquiring, carry_out, granted, hold, state
from proxy import Proxy
from test_frameworks import source_of

import rowlock
import rowlock.aio
from rowlock import clock, functions, mysql, postgres, sqlite
from rowlock.errors import Contention, Outage
from rowlock.functions import FunctionSession
from rowlock.kinds import Kind, One, Permit
from rowlock.listener import Listener
from rowlock.opening import is_permanent
from rowlock.protocol import Acquired, Change, Claim, Granted, Range, State, Wait, patience
from rowlock.sources import place_of
from rowlock.steps import Pauses, ending
from rowlock.terms import Terms

ONE = "00000000-0000-0000-0000-000000000001"


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Returns what the work returns, or fails if it hangs."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it has not returned in {seconds} s"
    return results[0]


@SERVERS
def test_a_request_to_a_silent_server_ends(db: Database) -> None:
    proxy = Proxy(db.url)
    session = place_of(proxy.url).session()
    session.patience = 60.0
    (first,) = session.send("claim", [(Terms("first", label="x"), ONE)])
    assert isinstance(first, Granted)
    proxy.silent = True
    session.patience = patience(3)  # As for a shorter lease, on the connection that is open.
    error = within(15, lambda: session.send("claim", [(Terms("second", label="x"), ONE)]))
    assert isinstance(error, Outage)
    assert error.sent


@SERVERS
@pytest.mark.parametrize("kind", ["open", "url", "function", "engine", "django"])
def test_a_renewal_leaves_a_silent_connection(
    db: Database, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is open since another renewal, or one that is being opened for the first."""
    proxy = Proxy(db.url)
    source = source_of(kind, Database(db.name, proxy.url), monkeypatch)
    held = acquired(rowlock.try_acquire(source, "k", lease=18))
    sent = held._state.sent
    if kind == "open":
        eventually(lambda: held._state.sent > sent)
        sent = held._state.sent
    proxy.silent = True
    eventually(lambda: proxy.swallowed)  # A renewal, or what opens its connection.
    proxy.silent = False
    eventually(lambda: held._state.sent > sent or held.lost)
    assert not held.lost
    held.release()


@SERVERS
def test_the_end_of_a_block_gives_up_on_a_silent_server(db: Database) -> None:
    proxy = Proxy(db.url)
    held = acquired(rowlock.try_acquire(proxy.url, "k", lease=600))
    proxy.silent = True
    assert isinstance(within(60, held.release), rowlock.Unknown)


@POSTGRES
def test_a_connection_that_is_to_listen_is_left_if_it_is_silent(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it is opened, and before it listens."""
    proxy = Proxy(db.url)
    connect = postgres.connect

    def silent(*given: Any, **named: Any) -> Any:
        connection = connect(*given, **named)
        proxy.silent = True
        return connection

    monkeypatch.setattr(postgres, "connect", silent)
    error = within(30, lambda: postgres.listening({"conninfo": proxy.url}))
    assert isinstance(error, TimeoutError)
    proxy.silent = False
    listener = Listener(lambda: silent({"conninfo": proxy.url}, autocommit=True), print)
    assert not listener.need()
    eventually(lambda: proxy.swallowed > 1 and listener._thread is None, 30)
    assert not listener.is_open


@POSTGRES
def test_no_statement_is_prepared(db: Database) -> None:
    """A pooler in transaction mode sends each execution to any of its servers."""
    renewal = Change(rowlock.Claim("k", ONE, 1), 30.0)
    for source in (db.url, lambda: psycopg.connect(db.url)):
        session = place_of(source).session()
        for _ in range(8):
            assert session.send("renew", [renewal]) == ["lost"]
            assert session.send("look", [Range("k", "k")]) == [[]]
        inner: Any = getattr(session, "_session", session)
        prepared = inner._connection.execute("SELECT count(*) FROM pg_prepared_statements")
        assert prepared.fetchone()[0] == 0
        session.close()


@POSTGRES
def test_a_server_that_is_read_only_for_a_while_is_an_outage(db: Database) -> None:
    name = db.url.rsplit("/", 1)[1]
    db.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(rowlock.Unavailable):
        rowlock.try_acquire(db.url, "k")

    def mend() -> None:
        with psycopg.connect(db.url, autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")

    threading.Timer(2, mend).start()
    began = time.monotonic()
    with rowlock.lock(db.url, "k", wait=30):
        assert time.monotonic() - began > 1.5

    end_sessions(db.url)

    async def run() -> None:
        db.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        threading.Timer(2, mend).start()
        began = time.monotonic()
        async with rowlock.aio.lock(db.url, "k", wait=30):
            assert time.monotonic() - began > 1.5

    asyncio.run(run())


class Broken(Exception):
    """An error of a driver, with the code of MySQL or the state of PostgreSQL."""

    def __init__(self, code: int, sqlstate: str | None = None, diag: Any = None) -> None:
        super().__init__(code, "it failed")
        self.sqlstate = sqlstate
        self.diag = diag or mock.Mock()


def test_a_connection_is_left_after_each_error_but_contention() -> None:
    """On a bad connection, each renewal would fail until the lease is lost."""
    change = Change(rowlock.Claim("k", ONE, 1))
    for kind, error, kept in (
        (mysql.MysqlSession, Broken(1146), False),
        (mysql.MysqlSession, Broken(1142), False),
        (mysql.MysqlSession, Broken(1213), True),
        (postgres.PostgresSession, Broken(0, "42501"), False),
        (postgres.PostgresSession, Broken(0, "40001"), True),
    ):
        version = mock.Mock()
        version.fetchall.return_value = [(functions.NEEDED,)]
        version.nextset.return_value = None
        connection = mock.Mock()
        rollback = mock.Mock()
        rollback.nextset.return_value = None
        connection.cursor.side_effect = [version, error, rollback]
        session = kind(functools.partial(lambda one, _: one, connection))
        with (
            mock.patch.object(session, "_cursor", lambda connection: connection.cursor()),
            mock.patch.object(session, "_check", return_value=None),
        ):
            outcomes = None
            with contextlib.suppress(rowlock.Error, Contention):
                outcomes = session.send("abandon", [change])
        assert connection.close.called != kept
        # Without transactions over several changes, those of one request have their own outcomes.
        assert outcomes == (["busy"] if kept and kind is mysql.MysqlSession else None)
    for code in mysql.READ_ONLY:
        outage = mysql.meaning(Broken(code))
        assert isinstance(outage, Outage)
        assert not outage.sent


def test_a_session_that_postgresql_ends_may_have_committed() -> None:
    for severity, code in (("PANIC", "53100"), ("FATAL", "58030"), ("FATAL", "XX000")):
        diag = mock.Mock(severity_nonlocalized=severity)
        outage = postgres.meaning(Broken(0, code, diag))
        assert isinstance(outage, Outage)
        assert outage.sent


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *((mysql.MysqlSession, Broken(code)) for code in (1021, 1041, 1114, 3024)),
        *((postgres.PostgresSession, Broken(0, state)) for state in ("53100", "53200", "57014")),
    ],
)
def test_a_server_that_lacks_something_refuses_no_key(
    kind: type[FunctionSession], error: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowlock.steps.TIME_LIMIT", 0.3)
    session = kind(lambda _: mock.Mock())
    with (
        mock.patch.object(session, "_fetch", side_effect=error),
        mock.patch.object(session, "_check"),
        mock.patch.object(session, "_rolled_back"),
    ):
        session._connection = mock.Mock()
        for wait in (0.0, 0.2):
            with pytest.raises(rowlock.Unavailable, match="it failed") as raised:
                carry_out(acquiring(Terms("k", label="x"), wait), session)
            assert raised.value.__cause__ is error
        with pytest.raises(rowlock.Unavailable, match=r"was not ended.*it failed"):
            carry_out(ending(state(), "release", "S"), session)


@SQLITE
def test_a_full_file_refuses_no_key(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite.connect

    def limited(file: str) -> sqlite3.Connection:
        connection = connect(file)
        connection.execute("PRAGMA max_page_count = 1")  # It takes no page more than it has.
        return connection

    monkeypatch.setattr(sqlite, "connect", limited)
    keys = [f"{number:0255}" for number in range(100)]
    with pytest.raises(rowlock.Unavailable, match="is full"):
        rowlock.connect(db.url).lock_all(keys).try_acquire()
    with rowlock.lock(db.url, "k"):
        pass


@pytest.mark.parametrize("kind", ["claim", "claim all", "release"])
def test_what_was_done_before_an_outage_is_not_denied(kind: str) -> None:
    """On MySQL each of the requests that travel together has a commit of its own."""
    granted = (1, 7, ONE, *[None] * 8)
    replies = iter([("done",) if kind == "release" else granted, Broken(1290)])

    def fetch(sql: str, _: Any) -> Any:
        if not sql.startswith("CALL") or sql == mysql.VERSION:
            return [(functions.NEEDED,)]
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return [reply]

    session = mysql.MysqlSession(lambda _: mock.Mock())
    terms = Terms("k", label="x")
    requests: dict[str, Any] = {
        "claim": (terms, ONE),
        "claim all": ([terms], ONE),
        "release": Change(rowlock.Claim("k", ONE, 7), "S"),
    }
    with (
        mock.patch.object(session, "_fetch", fetch),
        mock.patch.object(session, "_check"),
        pytest.raises(Outage) as raised,
    ):
        session.send(kind, [requests[kind]] * 2)
    assert raised.value.sent


def test_a_release_before_one_that_the_server_lacks_space_for_is_not_sent_again() -> None:
    """Another holder may have claimed its key since: this holder would be told of a loss."""
    replies = {"a": iter(["done", "lost"]), "b": iter([Broken(1114), "done"])}

    def fetch(sql: str, values: Any) -> Any:
        reply = next(replies[values[0]])
        if isinstance(reply, Exception):
            raise reply
        return [(reply,)]

    session = mysql.MysqlSession(lambda _: mock.Mock())
    session._connection = mock.Mock()
    held = State((Claim("a", "h", 7), Claim("b", "h", 8)), 30.0, clock.now())
    with (
        mock.patch.object(session, "_fetch", fetch),
        mock.patch.object(session, "_rolled_back"),
    ):
        carry_out(ending(held, "release", "S"), session)


def test_a_request_before_which_the_connection_fails_was_not_sent() -> None:
    """The version is asked for first."""
    connection = mock.Mock()
    session = postgres.PostgresSession(lambda _: connection)
    with (
        mock.patch.object(session, "_cursor", side_effect=Broken(0, "08P01")),
        pytest.raises(Outage) as raised,
    ):
        session.send("claim", [(Terms("k", label="x"), ONE)])
    assert not raised.value.sent
    assert connection.close.called


def test_an_end_is_tried_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowlock.steps.TIME_LIMIT", 0.3)
    for answer, error, text in (
        ("busy", rowlock.Unavailable, "has to commit inside the block"),
        (Contention(), rowlock.Unavailable, "has to commit inside the block"),
        (Outage(sent=True), rowlock.Unknown, "it is not known"),
        (Outage(sent=False, permanent=True), rowlock.Unavailable, "was not ended"),
    ):
        steps = ending(state(), "release", "S")
        fake = Fake(functools.partial(lambda answer, *_: answer, answer))
        result = within(15, functools.partial(carry_out, steps, fake))
        assert isinstance(result, error)
        assert text in str(result)


def test_an_end_that_has_freed_one_of_its_keys_has_changed_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rowlock.steps.TIME_LIMIT", 0.3)
    held = State((Claim("a", "h", 7), Claim("b", "h", 8)), 30.0, clock.now())
    fake = Fake(lambda _, change: "done" if change.claim.key == "a" else "busy")
    with pytest.raises(rowlock.Unknown, match=r"key 'b' was not ended.*commit inside the block"):
        carry_out(ending(held, "release", "S"), fake)


@SERVERS
def test_a_transaction_of_ones_own_that_outlasts_the_block_is_named(db: Database) -> None:
    connection = db.connect()
    held = acquired(rowlock.try_acquire(db.url, "k", lease=60))
    held.confirm(connection.cursor())
    error = within(30, held.release)
    assert isinstance(error, rowlock.Unavailable)
    assert "commit inside the block" in str(error)
    with pytest.raises(rowlock.Lost, match="was ended"):
        held.check()
    connection.rollback()
    connection.close()
    # The claim would stand for the rest of the minute.
    eventually(lambda: db.show("k")["state"] == "free")
    assert db.show("k")["status"] == "S"
    with pytest.raises(rowlock.Lost, match="was ended before"):
        held.release()


def test_an_end_without_a_reply_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several claims, each is ended once: another holder may have claimed the first since.

    Nothing that the caller had is kept, such as a connection that locks the row.
    """
    monkeypatch.setattr("rowlock.steps.TIME_LIMIT", 0.3)
    sent: list[str] = []
    is_open = threading.Event()

    def answer(name: str, request: Any) -> str:
        if name == "release" and request.claim.key == "b" and not is_open.is_set():
            return "busy"
        if name == "release":
            sent.append(request.claim.key)
        return "done"

    claims = (Claim("a", "h", 7), Claim("b", "h", 8))
    held = hold(Fake(answer), State(claims, 600.0, clock.now()))

    def release() -> weakref.ref[threading.Event]:
        own = threading.Event()
        with contextlib.suppress(rowlock.Unknown):
            held.release()
        return weakref.ref(own)

    own = release()
    gc.collect()
    assert own() is None
    assert sent == ["a"]
    is_open.set()
    eventually(lambda: sent == ["a", "b"])


def test_an_abandon_waits_for_a_renewal_in_flight() -> None:
    """One that the database carried out after it would hold the key for another lease."""
    reached, order = threading.Event(), list[str]()

    def answer(name: str, _: Any) -> str:
        if name == "renew":
            reached.set()
            time.sleep(1.5)
        order.append(name)
        return "done"

    fake = Fake(answer)
    held = hold(fake, state(9.0))
    assert reached.wait(10)
    held.abandon()
    assert order == ["renew", "abandon"]


def test_an_abandon_is_repeated_after_a_renewal_that_it_has_not_waited_out() -> None:
    """As one whose session is being opened: it is sent late, on another session."""
    reached, abandoned, order = threading.Event(), threading.Event(), list[str]()

    def answer(name: str, _: Any) -> str:
        if name == "renew":
            reached.set()
            abandoned.wait(60)
        order.append(name)
        return "done"

    held = hold(Fake(answer), state(6.0))
    assert reached.wait(10)
    held.abandon()
    assert order == ["abandon"]
    abandoned.set()
    eventually(lambda: order == ["abandon", "renew", "abandon"])


@SQLITE
def test_a_lease_without_a_thread_is_given_up(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the threads that it needs: the first sends the claim, and the second renews."""
    start = threading.Thread.start

    for name in ("rowlock requests", "rowlock renewals"):

        def broken_start(thread: threading.Thread, name: str = name) -> None:
            if thread.name == name:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as broken:
            broken.setattr(threading.Thread, "start", broken_start)
            with pytest.raises(RuntimeError, match="new thread"):
                rowlock.try_acquire(db.url, "k")
    # It was put back: the key is free, and no work has been missed.
    with rowlock.lock(db.url, "k", min_interval=60) as held:
        assert held.taken_over_from is None


@SQLITE
def test_a_message_without_a_thread_ends_no_renewal_and_a_loss_is_told(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning of a renewal that waits for the file is dropped, and not the call of a loss."""
    start = threading.Thread.start

    def broken_start(thread: threading.Thread) -> None:
        if thread.name in ("rowlock events", "rowlock loss"):
            raise RuntimeError("can't start new thread")
        start(thread)

    losses: queue.Queue[rowlock.Lost] = queue.Queue()
    with (
        contextlib.suppress(rowlock.Lost),
        rowlock.lock(db.url, "k", lease=6, on_lost=losses.put) as lease,
    ):
        monkeypatch.setattr(threading.Thread, "start", broken_start)
        other = sqlite3.connect(db.url.removeprefix("sqlite:"), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        time.sleep(3)
        other.execute("ROLLBACK")
        time.sleep(6)
        assert lease.owned()
        other.execute("UPDATE t_resource_lock SET token = token + 1")
        assert losses.get(timeout=20).key == "k"


def test_what_would_fail_again_is_not_waited_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for source in ("postgres://app@127.0.0.1:1/db", f"sqlite:{tmp_path / 'none'}", lambda: 1 / "a"):  # type: ignore[operator]
        began = time.monotonic()
        with pytest.raises(rowlock.Unavailable):
            rowlock.lock(source, "k", wait=60).__enter__()
        assert time.monotonic() - began < 30


@SERVERS
def test_a_missing_database_is_not_waited_for(db: Database) -> None:
    for wait_for in (rowlock.lock, rowlock.aio.lock):
        held: Any = wait_for(f"{db.url}_none", "k", wait=60)

        def enter(held: Any = held) -> None:
            if isinstance(held, rowlock.aio.Lock):
                asyncio.run(held.__aenter__())
            else:
                held.__enter__()

        assert isinstance(within(30, enter), rowlock.Unavailable)


@pytest.mark.parametrize("kind", ["lock", "lock_all", "semaphore", "read", "write"])
def test_a_request_that_fails_is_logged_once_and_so_is_its_end(
    db: Database, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A host that is mistyped, or a wrong setting, would stay unknown in a wait without an end."""
    ready, fails, works = threading.Event(), "'k' cannot be asked for", "'k' is asked for again"

    def connect() -> Any:
        if not ready.is_set():
            raise RuntimeError("it is not configured")
        return db.connect()

    locks = rowlock.connect(connect)
    with rowlock.lock(db.url, "other"):  # A wait for a holder is none of these failures.
        assert not rowlock.lock(db.url, "other").acquire(0.2)
    kinds: dict[str, Callable[[], rowlock.Lock]] = {
        "lock": lambda: locks.lock("k", wait=None),
        "lock_all": lambda: locks.lock_all(["k", "l"], wait=None),
        "semaphore": lambda: locks.semaphore("k", 2, wait=None),
        "read": lambda: locks.read_write("k", wait=None).read(),
        "write": lambda: locks.read_write("k", wait=None).write(),
    }
    tries = threading.Thread(target=lambda: kinds[kind]().__enter__().release())
    tries.start()
    eventually(lambda: fails in caplog.text)
    assert "it is not configured" in caplog.text
    ready.set()
    tries.join(60)
    eventually(lambda: works in caplog.text)
    assert (caplog.text.count(fails), caplog.text.count(works)) == (1, 1)
    assert "other" not in caplog.text


def test_a_request_that_fails_at_once_is_an_error_alone() -> None:
    told: list[str | None] = []
    for seconds, count in ((0.0, 0), (0.5, 1)):
        wait = Wait(clock.now() + seconds, tell=told.append)
        steps = One(Terms("k")).acquiring(wait, lambda: Pauses(0.02, 1.0), lambda _: None)
        with pytest.raises(rowlock.Unavailable):
            carry_out(steps, Fake(lambda *_: Outage(sent=False)))
        assert len(told) == count


@pytest.mark.parametrize("kind", ["semaphore", "fair", "fair semaphore"])
@pytest.mark.parametrize("lasts", [False, True])
def test_a_session_that_was_lost_before_a_claim_is_opened_anew(kind: str, lasts: bool) -> None:
    """As after a restart of the server: what precedes the claim is only read."""
    terms = Terms("k", fair="fair" in kind)
    wanted: Kind = Permit(terms, 2) if "semaphore" in kind else One(terms)
    failures = itertools.repeat(Outage(sent=True)) if lasts else iter([Outage(sent=True)])

    def answer(kind: str, request: Any) -> Any:
        if kind in ("look", "front"):
            return next(failures, [])
        return granted(request)

    steps = wanted.acquiring(Wait(0.0), lambda: Pauses(0.02, 1.0), lambda _: None)
    if lasts:
        with pytest.raises(rowlock.Unavailable):
            carry_out(steps, Fake(answer))
    else:
        assert isinstance(carry_out(steps, Fake(answer)), Acquired)


def test_tries_to_connect_are_spaced() -> None:
    fake = Fake(lambda *_: Outage(sent=False))
    with pytest.raises(rowlock.Unavailable):
        carry_out(acquiring(Terms("k"), 3.0), fake)
    assert len(fake.requests) < 20


@POSTGRES
def test_a_second_cancellation_does_not_stop_an_end(db: Database) -> None:
    async def run() -> None:
        held, ended = asyncio.Event(), threading.Event()

        async def hold() -> None:
            async with rowlock.aio.lock(db.url, "k") as lease:
                session: Any = lease._on.requests._session
                send = session.send

                def slow(kind: str, requests: Any) -> Any:
                    time.sleep(0.5)
                    replies = send(kind, requests)
                    if kind == "abandon":
                        ended.set()
                    return replies

                session.send = slow
                held.set()
                await asyncio.sleep(1000)

        task = asyncio.create_task(hold())
        await held.wait()
        task.cancel()
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        assert await asyncio.to_thread(ended.wait, 20)
        async with rowlock.aio.lock(db.url, "k") as lease:
            assert lease.taken_over_from is not None

    asyncio.run(run())
    assert (
        refused(rowlock.try_acquire(db.url, "k", min_interval=60)).reason == "within_min_interval"
    )


def test_which_failures_to_connect_would_repeat() -> None:
    text = 'connection failed: FATAL:  password authentication failed for user "app"'
    assert is_permanent(psycopg.OperationalError(text))
    assert is_permanent(pymysql.err.OperationalError(1045, "Access denied for user"))
    assert not is_permanent(psycopg.OperationalError("connection failed: Connection refused"))
    assert not is_permanent(pymysql.err.OperationalError(2003, "Can't connect to MySQL server"))
    assert not is_permanent(TimeoutError("timed out"))
