"""Order across processes and languages: tickets, as fair handles of the crate draw them."""

from __future__ import annotations

import subprocess
import threading
import time
from typing import Any

import pytest
from conftest import SQLITE, Database, acquired, eventually, refused
from fakes import Fake, carry_out, database, granted, together

import rowlock
from rowlock import clock, sqlite
from rowlock.errors import Contention
from rowlock.kinds import Permit
from rowlock.protocol import Acquired, Steps, Wait
from rowlock.steps import Pauses, asking, reading
from rowlock.terms import Terms
from rowlock.tickets import NONE, Fair, Position, position


def test_a_position_follows_from_the_front() -> None:
    for number, front, at in (
        (7, [], Position(None, is_missing=True)),
        (NONE, [], Position(None)),
        (7, [(7, -1.0)], Position(None)),
        (7, [(5, 3.0), (7, 9.0)], Position(3.0)),
        (7, [(4, -1.0), (5, 3.0), (7, 9.0)], Position(3.0, lapsed=(4,))),
        (7, [(4, 0.0), (7, 9.0)], Position(None, lapsed=(4,))),
        (NONE, [(4, 2.0)], Position(2.0)),
    ):
        assert position(number, front) == at
    lapsed = [(one, 0.0) for one in range(16)]
    assert position(99, lapsed).is_unknown


def test_a_ticket_is_drawn_once_though_that_of_another_is_drawn_again() -> None:
    """One that no waiter has would delay those behind it until it lapses."""
    drawn: list[int] = []
    replies = iter([None, Contention()])

    def answer(_: str, __: Any) -> Any:
        if (failure := next(replies, None)) is not None:
            return failure
        drawn.append(len(drawn))
        return (drawn[-1],)

    def joining() -> Steps[None]:
        never: Any = None
        fair = Fair(never, "k", Wait(float("inf")))
        fair._was_refused = True
        return reading(fair._stay, Wait(float("inf")))

    on = database(Fake(answer))
    with together(on):
        results = [on.ask(joining(), 30.0) for _ in range(2)]
    for result in results:
        result.result(30)
    assert drawn == [0, 1]


def test_waiters_are_granted_the_key_in_order(db: Database) -> None:
    """A Python waiter, the program, and another Python waiter, which began in this order."""
    held = acquired(rowlock.try_acquire(db.url, "k"))
    tokens: dict[str, int] = {}

    def wait(name: str) -> None:
        with rowlock.lock(db.url, "k", wait=60, fair=True) as lease:
            tokens[name] = lease.token

    def waiting(count: int) -> bool:
        rows = db.execute("SELECT COUNT(*) FROM t_resource_lock_queue")
        return bool(rows[0][0] == count)

    first = threading.Thread(target=wait, args=("first",))
    first.start()
    eventually(lambda: waiting(1))
    command = ["run", "k", "--wait", "60s", "--fair", "--", "sh", "-c", "echo $ROWLOCK_TOKEN"]
    program = db.start(*command, stdout=subprocess.PIPE)
    eventually(lambda: waiting(2))
    last = threading.Thread(target=wait, args=("last",))
    last.start()
    eventually(lambda: waiting(3))
    refusal = rowlock.lock(db.url, "k", fair=True).try_acquire()
    assert refused(refusal).reason == "queued"
    held.release()
    first.join(60)
    last.join(60)
    said = program.communicate(timeout=60)[0]
    assert program.returncode == 0
    assert tokens["first"] < int(said) < tokens["last"]
    eventually(lambda: waiting(0))


def test_a_ticket_of_a_process_that_has_died_lapses(db: Database) -> None:
    held = acquired(rowlock.try_acquire(db.url, "k"))
    killed = db.start("run", "k", "--wait", "600s", "--fair", "--", "true")
    eventually(lambda: db.execute("SELECT COUNT(*) FROM t_resource_lock_queue")[0][0] == 1)
    killed.kill()
    killed.wait()
    held.release()
    with rowlock.lock(db.url, "k", wait=60, fair=True):
        pass
    assert db.execute("SELECT COUNT(*) FROM t_resource_lock_queue")[0][0] == 0


def test_a_waiter_that_gives_up_leaves_no_ticket(db: Database) -> None:
    with rowlock.lock(db.url, "k"):
        refusal = rowlock.lock(db.url, "k", fair=True).acquire(0.5)
        assert refused(refusal).reason == "held"
        assert db.execute("SELECT COUNT(*) FROM t_resource_lock_queue")[0][0] == 0


@SQLITE
def test_a_ticket_is_deleted_though_another_connection_writes_then(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stayed would delay those behind it until it lapses."""
    other = db.connect()
    outcomes: list[Exception | None] = []
    send = sqlite.SqliteSession.send

    def sent(session: sqlite.SqliteSession, kind: str, requests: Any) -> Any:
        if kind == "leave" and not outcomes:
            other.execute("BEGIN IMMEDIATE")
        try:
            replies = send(session, kind, requests)
        except Exception as error:
            outcomes.append(error)
            other.rollback()
            raise
        if kind == "leave":
            outcomes.append(None)
        return replies

    monkeypatch.setattr(sqlite.SqliteSession, "send", sent)
    held = acquired(rowlock.try_acquire(db.url, "k"))
    queue = "SELECT COUNT(*) FROM t_resource_lock_queue"

    def release() -> None:
        eventually(lambda: db.execute(queue)[0][0] == 1)
        held.release()

    releases = threading.Thread(target=release)
    releases.start()
    acquired(rowlock.lock(db.url, "k", wait=60, fair=True).acquire()).release()
    releases.join(60)
    assert [type(outcome) for outcome in outcomes] == [Contention, type(None)]
    assert db.execute(queue)[0][0] == 0


def test_a_ticket_that_cannot_be_deleted_delays_no_lease_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(clock, "now", lambda: sum(slept))

    def answer(kind: str, request: Any) -> Any:
        return Contention() if kind == "leave" else granted(request)

    wait = Wait(clock.now() + 60)
    terms = Terms("k", lease=0.4)
    fair = Fair(lambda holder: asking(terms, holder), "k", wait)
    fair._ticket, fair._is_sent = 7, True  # A claim that may stand is asked for at once.
    fake = Fake(answer)
    reply = carry_out(fair.acquiring(terms, Pauses(0.02, 1.0)), fake, slept.append)
    assert isinstance(reply, Acquired)
    assert 0 < sum(slept) < 0.2
    kinds = [kind for kind, _ in fake.requests]
    assert kinds[0] == "claim"
    assert set(kinds[1:]) == {"leave"}


def test_permits_are_granted_in_order(db: Database) -> None:
    locks = rowlock.connect(db.url)
    pool = locks.semaphore("pool", 2, fair=True, wait=60)
    held = [acquired(pool.acquire()), acquired(pool.acquire())]
    order: list[int] = []

    def wait(number: int) -> None:
        with acquired(pool.acquire()):
            order.append(number)
            time.sleep(0.1)

    sql = "SELECT COUNT(*) FROM t_resource_lock_queue WHERE key_resource = 'pool#'"
    waiters = []
    for number in range(3):
        waiters.append(threading.Thread(target=wait, args=(number,)))
        waiters[-1].start()
        eventually(lambda: db.execute(sql)[0][0] == len(waiters))
    held[0].release()
    for waiter in waiters:
        waiter.join(60)
    assert order == [0, 1, 2]
    held[1].release()


def test_a_refusal_of_a_queue_names_what_was_asked_for() -> None:
    """Not the row in which a semaphore has its queue."""
    fake = Fake(lambda kind, _: [(3, 9.0)] if kind == "front" else [])
    kind = Permit(Terms("pool", fair=True), 2)
    reply = carry_out(kind.acquiring(Wait(0.0), lambda: Pauses(0.02, 1.0), lambda _: None), fake)
    assert isinstance(reply, rowlock.Refusal)
    assert (reply.key, reply.reason) == ("pool", "queued")


@pytest.mark.parametrize("make", ["lock_all", "read_write"])
def test_what_cannot_be_fair_is_refused(make: str) -> None:
    locks = rowlock.connect("sqlite:/nowhere")
    with pytest.raises(ValueError, match="cannot be fair"):
        getattr(locks, make)(["k"] if make == "lock_all" else "k", fair=True)
