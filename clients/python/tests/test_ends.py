"""Claims whose callers go away: interrupts, the end of the process, finalizers, signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest
from conftest import MYSQL, POSTGRES, SQLITE, Database, acquired, eventually, refused
from fakes import Fake, database, granted, hold, state, together

import rowlock
import rowlock.aio
from rowlock import clock, confirm
from rowlock.database import Database as Sessions
from rowlock.database import Request, wait_of
from rowlock.errors import Outage
from rowlock.kinds import All, One, Reader, Writer
from rowlock.protocol import Acquired
from rowlock.sources import Place
from rowlock.terms import Terms


def run(db: Database, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=db.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


INTERRUPTED = """
import os, signal, sys, threading
import rowlock
from rowlock import sqlite, functions

signal.signal(signal.SIGINT, signal.default_int_handler)  # In the background it is ignored.
locks = rowlock.connect(os.environ["DATABASE_URL"])
locks.lock("other").acquire().release()
session = sqlite.SqliteSession if "sqlite" in os.environ["DATABASE_URL"] else None
for kind in [session] if session else functions.FunctionSession.__subclasses__():
    send = kind.send
    def interrupt(self, kind, requests, send=send):
        replies = send(self, kind, requests)
        if kind.startswith("claim"):
            os.kill(os.getpid(), signal.SIGINT)  # The claim is granted, and no caller knows.
            threading.Event().wait(0.2)
        return replies
    kind.send = interrupt
HOLD
"""


@pytest.mark.parametrize(
    ("ask", "keys"),
    [
        ("locks.lock('k', lease=3600).acquire()", ["k"]),
        ("locks.lock_all(['a', 'b'], lease=3600).acquire()", ["a", "b"]),
        ("locks.semaphore('s', 1, lease=3600).acquire()", ["s#1"]),
        ("locks.read_write('n', lease=3600).write().acquire()", ["n"]),
    ],
)
def test_a_process_that_is_interrupted_while_it_acquires_leaves_no_key(
    db: Database, ask: str, keys: list[str]
) -> None:
    done = run(db, INTERRUPTED.replace("HOLD", ask))
    assert "KeyboardInterrupt" in done.stderr, done.stdout + done.stderr
    for key in keys:
        assert db.show(key)["state"] == "free"
        assert db.run("acquire", key).returncode == 0


def test_a_program_ends_though_a_loop_over_terms_is_left_open(db: Database) -> None:
    program = """
import os
import rowlock
locks = rowlock.connect(os.environ["DATABASE_URL"])
terms = locks.leader("scheduler")
for lease in terms:
    break

def items():
    with locks.lock("k"):
        yield 1

left = items()
next(left)
print("end")
"""
    done = run(db, program)
    assert done.stdout == "end\n", done.stderr


@pytest.mark.parametrize("left", [ValueError, KeyboardInterrupt, None])
def test_a_term_whose_body_leaves_the_loop_is_abandoned(db: Database, left: Any) -> None:
    """Else work that has failed, or that was interrupted, would be recorded as a success."""
    locks = rowlock.connect(db.url)
    tokens: list[int] = []

    def lead() -> None:
        for lease in locks.leader("scheduler", rules="article"):
            tokens.append(lease.token)
            assert lease.taken_over_from is None
            if len(tokens) < 3:
                continue
            if left is None:
                break
            raise left

    with contextlib.suppress(ValueError, KeyboardInterrupt):
        lead()
    assert len(tokens) == 3
    assert db.show("scheduler")["state"] == "expired"
    assert refused(locks.lock("scheduler", rules="article").try_acquire()).key == "scheduler"


@pytest.mark.parametrize("left", [ValueError, asyncio.CancelledError, None])
def test_a_term_of_a_task_whose_body_leaves_the_loop_is_abandoned(db: Database, left: Any) -> None:
    async def lead() -> None:
        locks = rowlock.aio.connect(db.url)
        async with contextlib.aclosing(locks.leader("scheduler", rules="article")) as terms:
            number = 0
            async for lease in terms:
                assert lease.taken_over_from is None
                number += 1
                if number < 3:
                    continue
                if left is None:
                    break
                raise left

    with contextlib.suppress(ValueError, asyncio.CancelledError):
        asyncio.run(lead())
    assert db.show("scheduler")["state"] == "expired"


def test_a_term_that_was_released_in_the_body_is_not_abandoned(db: Database) -> None:
    for lease in rowlock.connect(db.url).leader("scheduler"):
        lease.release()
        break
    assert (db.show("scheduler")["state"], db.show("scheduler")["status"]) == ("free", "S")


@pytest.mark.parametrize("kind", ["thread", "task"])
def test_a_term_whose_end_fails_is_logged_and_the_next_one_begins(
    db: Database, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A transaction that has confirmed it is open."""
    told = "has not ended as it should"
    connection = db.connect()

    def end() -> None:
        eventually(lambda: told in caplog.text)
        connection.rollback()

    ends = threading.Thread(target=end)
    tokens: list[int] = []

    def work(lease: Any) -> None:
        tokens.append(lease.token)
        if len(tokens) == 1:
            cursor = connection.cursor()
            sql, values = confirm.confirm_statement(cursor, lease.claim, None)
            cursor.execute(sql, values)
            ends.start()

    async def lead() -> None:
        locks = rowlock.aio.connect(db.url)
        async with contextlib.aclosing(locks.leader("scheduler", lease=3)) as terms:
            async for lease in terms:
                work(lease)
                if len(tokens) == 2:
                    break

    if kind == "task":
        asyncio.run(lead())
    else:
        for lease in rowlock.connect(db.url).leader("scheduler", lease=3):
            work(lease)
            if len(tokens) == 2:
                break
    ends.join(60)
    connection.close()
    assert tokens[1] > tokens[0]
    assert caplog.text.count(told) == 1


def test_a_block_that_is_collected_on_a_thread_of_the_library_hangs_nothing() -> None:
    """Its generator is part of a cycle, which the thread's own garbage collection ends."""
    fake = Fake(lambda kind, request: granted(request) if kind == "claim" else "done")
    lease = hold(fake, state(30.0))
    on = lease._on

    def items() -> Generator[int, None, None]:
        with lease:
            yield 1

    def collect() -> Any:
        cycle: list[Any] = [items()]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        gc.collect()
        return
        yield

    on.ask(collect(), 30.0).result(30)
    assert on.ask(collect_nothing(), 30.0).result(30) == "here"
    assert lease._state.ended
    abandoned = ("abandon", lease.claim)
    eventually(lambda: abandoned in [(kind, one.claim) for kind, one in fake.requests])


def collect_nothing() -> Any:
    return "here"
    yield


@SQLITE
def test_a_signal_handler_may_release_a_lease(db: Database) -> None:
    locks = rowlock.connect(db.url)
    kept = acquired(locks.lock("kept", lease=600).acquire())
    held: list[rowlock.Lease] = []
    handled = 0

    def handler(*_: Any) -> None:
        nonlocal handled
        if held:
            held.pop().release()
            handled += 1

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.0031)
        until = time.monotonic() + 5
        while time.monotonic() < until or handled <= 10:
            if not held:
                held.append(acquired(locks.lock("k", wait=30).acquire()))
            kept.extend(600)  # The handler interrupts it wherever it is.
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    kept.release()


@SQLITE
@pytest.mark.parametrize("ask", ["owned", "extend", "release"])
def test_a_signal_handler_may_wait_while_a_lease_is_looked_at(db: Database, ask: str) -> None:
    """Neither the lease nor the loop has a mutex that the interrupted code may hold."""
    file = db.url.removeprefix("sqlite:")
    locks = rowlock.Locks(lambda: sqlite3.connect(file))  # Its threads end after each task.
    lease = acquired(locks.lock("k", lease=600).acquire())
    other = [acquired(locks.lock("other", lease=600).acquire())]
    handled = 0

    def handler(*_: Any) -> None:
        nonlocal handled
        if ask == "owned":
            assert lease.owned()
        elif ask == "extend":
            lease.extend(600)
        elif other:
            other.pop().release()
        handled += 1

    before = signal.signal(signal.SIGALRM, handler)
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until or handled <= 10:
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            for _ in range(2000):
                lease.check()
                assert lease.time_left > 0
            if not other:
                other.append(acquired(locks.lock("other", lease=600).acquire()))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    lease.release()


def test_a_takeover_that_is_left_is_told_to_the_next_holder(db: Database) -> None:
    crashed = db.start("run", "k", "--lease", "1s", "--label", "crashed", "--", "sleep", "1000")
    locks = rowlock.connect(db.url)
    eventually(lambda: locks.lock("k").locked())
    crashed.kill()
    crashed.wait()
    request = Request(wait_of(60))
    on = locks.lock("k")._access.database()
    on.acquire(One(Terms("k", label="left")), request)
    request.asking.result.result(60)
    request.asking.leave()
    with locks.lock("k", wait=60, min_interval=3600) as lease:
        assert lease.taken_over_from is not None
        assert lease.taken_over_from.label == "crashed"


def test_a_set_that_is_left_is_a_takeover_of_those_keys_alone_that_were(db: Database) -> None:
    """No work was begun under the claims on the others."""
    locks = rowlock.connect(db.url)
    acquired(locks.lock("b", label="crashed").acquire()).abandon()
    request = Request(wait_of(60))
    on = locks.lock("b")._access.database()
    on.acquire(All(Terms("a", label="left"), ["a", "b", "c"]), request)
    request.asking.result.result(60)
    request.asking.leave()
    for key in ("a", "b", "c"):
        with locks.lock(key, wait=60) as lease:
            previous = lease.taken_over_from
            assert (previous and previous.label) == ("crashed" if key == "b" else None)


@MYSQL
def test_sessions_that_chain_transactions_commit_each_claim(db: Database) -> None:
    def connect() -> Any:
        connection = db.connect()
        connection.cursor().execute("SET SESSION completion_type = 'CHAIN'")
        return connection

    with rowlock.connect(connect) as locks:
        with locks.lock_all(["a", "b"]):
            assert db.run("acquire", "a").returncode == 75
        assert refused(_held(locks, db)).key == "c"
        for key in ("k", "l"):
            with locks.lock(key):
                assert db.run("acquire", key).returncode == 75
            assert db.show(key)["status"] == "S"


def _held(locks: rowlock.Locks, db: Database) -> rowlock.Lease | rowlock.Refusal:
    """A set that is refused rolls back."""
    with rowlock.lock(db.url, "c"):
        return locks.lock_all(["a", "c"]).try_acquire()


@POSTGRES
def test_a_table_in_another_schema_than_the_functions_is_refused(db: Database) -> None:
    db.execute("CREATE SCHEMA tenant")
    db.execute("CREATE TABLE tenant.t_resource_lock (LIKE t_resource_lock INCLUDING ALL)")
    url = f"{db.url}?options=-csearch_path%3Dtenant,public"
    with pytest.raises(rowlock.NotInstalled, match="search_path leads to the functions in one"):
        rowlock.try_acquire(url, "k")


@POSTGRES
def test_rows_that_another_transaction_has_locked_lose_no_other_lease(db: Database) -> None:
    locks = rowlock.connect(db.url)
    held = [acquired(locks.lock(f"k{number:02}", lease=4).acquire()) for number in range(24)]
    other = db.connect()
    other.execute("SELECT 1 FROM t_resource_lock WHERE key_resource < 'k16' FOR UPDATE")
    sent = [lease._state.sent for lease in held[16:]]
    eventually(lambda: all(one._state.sent > was for one, was in zip(held[16:], sent, strict=True)))
    time.sleep(4)
    assert not any(lease.lost for lease in held[16:])
    other.rollback()
    other.close()
    for lease in held[16:]:
        lease.release()


@POSTGRES
def test_locked_rows_that_are_asked_for_together_end_no_connection(db: Database) -> None:
    """Each takes the server 100 ms, and the reply to a claim of a short lease is due in 1 s."""
    locks = rowlock.connect(db.url)
    keys = [f"k{number:02}" for number in range(16)]
    acquired(locks.lock_all(keys).acquire()).release()
    other = db.connect()
    other.execute("SELECT 1 FROM t_resource_lock FOR UPDATE")
    on = locks.lock("k")._access.database()
    requests = [Request(wait_of(0)) for _ in (*keys, "free")]
    with together(on):
        for key, request in zip((*keys, "free"), requests, strict=True):
            on.acquire(One(Terms(key, lease=3, label="x")), request)
    *busy, free = [request.asking.result.result(60) for request in requests]
    assert [isinstance(one, rowlock.Refusal) and one.reason for one in busy] == ["busy"] * 16
    assert isinstance(free, Acquired)
    other.rollback()
    other.close()


@POSTGRES
def test_a_request_needs_no_new_file_descriptor(db: Database) -> None:
    done = run(db, WITHOUT_FILES)
    assert done.stdout == "extended\n", done.stderr


#: No file can be opened any more. The sessions are open.
WITHOUT_FILES = """
import os, resource
import rowlock
with rowlock.lock(os.environ["DATABASE_URL"], "k", lease=600) as lease:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    lease.extend(900)
    print("extended")
"""


@SQLITE
def test_a_request_that_cannot_be_sent_locks_no_file(db: Database) -> None:
    with pytest.raises(ValueError, match="label"):
        rowlock.try_acquire(db.url, "k", label=os.fsdecode(b"caf\xe9"))
    on = rowlock.connect(db.url).lock("k")._access.database()
    terms = Terms("k", label="x")
    object.__setattr__(terms, "label", "\udce9")  # As if a check had let it through.
    request = Request(wait_of(0))
    on.acquire(One(terms), request)
    with pytest.raises(UnicodeEncodeError):
        request.asking.result.result(60)
    db.execute("CREATE TABLE another (one INT)")
    with rowlock.lock(db.url, "k"):
        pass


def test_a_short_extension_stops_no_renewal() -> None:
    fake = Fake(lambda *_: "done")
    lease = hold(fake, state(3.0))
    until = clock.now() + 5
    while clock.now() < until:
        lease.extend(0.5)
        assert not lease.lost
        time.sleep(0.1)
    assert not lease.lost
    lease.release()


def test_a_release_after_the_end_of_the_locks_keeps_no_session() -> None:
    """The thread of the requests had ended, and the release has begun another one."""
    fake = Fake(lambda kind, request: granted(request) if kind == "claim" else "done")
    on = Sessions(Place(object(), lambda: fake))
    request = Request(wait_of(0))
    on.acquire(One(Terms("k")), request)
    acquired = request.asking.result.result(30)
    assert isinstance(acquired, Acquired)
    request.delivered()
    on.close()
    eventually(lambda: on.requests._thread is None)
    on.end(acquired.state, "release", "S").result(30)
    eventually(lambda: on.requests._thread is None and on.renewals._thread is None, 15)


def test_an_extension_without_a_reply_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowlock.steps.TIME_LIMIT", 0.3)
    for answer, error in ((Outage(sent=True), rowlock.Unknown), ("busy", rowlock.Unavailable)):
        fake = Fake(lambda *_, answer=answer: answer)
        lease = hold(fake, state(30.0))
        with pytest.raises(error, match="was not extended"):
            lease.extend(60)


def test_semaphores_and_readers_wait_through_an_outage() -> None:
    began = clock.now()

    def answer(kind: str, request: Any) -> Any:
        if clock.now() < began + 1.5:
            return Outage(sent=False)
        if kind == "look":
            return []
        return granted(request) if kind == "claim" else "done"

    on = database(Fake(answer))
    from rowlock.kinds import Permit

    for kind in (Permit(Terms("s"), 2), One(Terms("k"))):
        request = Request(wait_of(30))
        on.acquire(kind, request)
        assert not isinstance(request.asking.result.result(30), rowlock.Refusal)
        request.asking.leave()


@pytest.mark.parametrize("kind", [Reader, Writer])
def test_a_caller_that_leaves_ends_a_look_at_a_server_that_is_away(
    kind: type[Reader | Writer], caplog: pytest.LogCaptureFixture
) -> None:
    """The claim was granted: it has to be put back, before the process ends."""

    def answer(kind: str, request: Any) -> Any:
        if kind == "look":
            return Outage(sent=False)
        return granted(request) if kind == "claim" else "done"

    fake = Fake(answer)
    on = database(fake)
    request = Request(wait_of(None))
    on.acquire(kind(Terms("k")), request)
    eventually(lambda: "'k' cannot be asked for" in caplog.text)
    request.asking.leave()
    with pytest.raises(rowlock.Unavailable):
        request.asking.result.result(30)
    assert fake.requests[-1][0] == "put back"


def test_a_waiter_leaves_no_memory_of_its_key() -> None:
    refusal = rowlock.Refusal("k", "held", retry_after=60.0)
    on = database(Fake(lambda kind, _: False if kind == "await" else refusal))
    on.keep()
    for number in range(5):
        request = Request(wait_of(0.2))
        on.acquire(One(Terms(f"k{number}")), request)
        request.asking.result.result(30)
    assert on.requests._waiting == {}


def test_a_loss_is_logged(db: Database, caplog: pytest.LogCaptureFixture) -> None:
    lease = acquired(rowlock.try_acquire(db.url, "k", lease=4))
    assert db.run("release", "k", "--force").returncode == 0
    eventually(lambda: "the claim on key 'k' is lost" in caplog.text)
    assert lease.lost


def test_a_callback_that_blocks_delays_nothing(db: Database) -> None:
    """Neither renewals, one of which sees the other loss, nor the callback that is told of it."""
    began, blocked, told = threading.Event(), threading.Event(), threading.Event()

    def block(_: rowlock.Lost) -> None:
        began.set()
        blocked.wait(60)

    locks = rowlock.connect(db.url)
    leases = [
        acquired(locks.lock("a", lease=9, on_lost=block).acquire(30)),
        acquired(locks.lock("b", lease=9, on_lost=lambda _: told.set()).acquire(30)),
    ]
    assert db.run("release", "a", "--force").returncode == 0
    assert began.wait(30)
    assert db.run("release", "b", "--force").returncode == 0
    assert told.wait(10)
    blocked.set()
    assert [lease.lost for lease in leases] == [True, True]


def test_arguments_that_help() -> None:
    locks = rowlock.connect("sqlite:/nowhere")
    wrong: Any = locks
    with pytest.raises(TypeError, match="timeout: not known; a lock takes lease, wait"):
        wrong.lock("k", timeout=5)
    with pytest.raises(TypeError, match="a list of keys, not a str"):
        locks.lock_all("abc")
    with pytest.raises(TypeError, match="label 3"):
        wrong.lock("k", label=3)
    with pytest.raises(TypeError, match="on_lost 5"):
        wrong.lock("k", on_lost=5)
    with pytest.raises(rowlock.Unavailable, match="unable to open database file '/nowhere'"):
        locks.lock("k").acquire(wait=30)


def test_a_cursor_of_another_database_is_no_loss(db: Database, tmp_path: Any) -> None:
    if db.name == "sqlite":
        return
    cursor = sqlite3.connect(tmp_path / "other.db").cursor()
    with rowlock.lock(db.url, "k") as lease, pytest.raises(TypeError, match="cursor is one of"):
        lease.confirm(cursor)


def test_a_refusal_is_an_object_in_json() -> None:
    refusal = rowlock.Refusal("k", "held", by="a\nb")
    assert json.loads(json.dumps(refusal.__json__()))["reason"] == "held"
    assert str(refusal) == "k: held, by a\\nb"
