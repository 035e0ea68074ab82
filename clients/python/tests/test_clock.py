"""A machine that sleeps while a lease is held: the clock jumps, and no pause has counted it."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
from conftest import Database, acquired, eventually, refused
from fakes import Fake, acquiring, database, granted, hold, is_renewed, state

import rowlock
from rowlock import clock
from rowlock.database import _WATCH, Request, wait_of
from rowlock.kinds import One
from rowlock.loop import Loop, Task
from rowlock.protocol import Acquired, Call, Pause, Steps
from rowlock.steps import renewing
from rowlock.terms import Terms

HOUR = 3600.0
#: Much longer than any look at the clock, and much shorter than the pause until a renewal.
PATIENCE = 60.0


class Machine:
    """Its clock counts the sleep. The pauses of its threads do not."""

    def __init__(self) -> None:
        self.slept = 0.0

    def now(self) -> float:
        return time.monotonic() + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clock, "now", machine.now)
    return machine


def until(steps: Steps[Any], machine: Machine) -> tuple[Call, list[float]]:
    """Pauses as long as the steps want. Returns the next request, and the pauses before it."""
    pauses: list[float] = []
    step = next(steps)
    while isinstance(step, Pause):
        pauses.append(step.seconds)
        assert len(pauses) < 10_000, "the pauses end at no time of the clock"
        machine.sleep(step.seconds)
        step = next(steps)
    return step, pauses


def check_lost(lease: rowlock.Lease) -> None:
    assert lease.lost
    assert lease.time_left == 0
    with pytest.raises(rowlock.Lost, match="no renewal succeeded before its lease ended"):
        lease.check()


def test_the_clock_is_the_one_that_counts_suspended_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 7, raising=False)
    monkeypatch.setattr(time, "CLOCK_MONOTONIC_RAW", 4, raising=False)
    assert clock.counting_sleep("linux") == 7
    assert clock.counting_sleep("darwin") == 4
    assert clock.counting_sleep("win32") is None
    monkeypatch.setattr(time, "clock_gettime", {7: 70.0, 4: 40.0}.get, raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: 10.0)
    for known, read in ((7, 70.0), (4, 40.0), (None, 10.0)):
        monkeypatch.setattr(clock, "_CLOCK", known)
        assert clock.now() == read


def test_the_clock_is_that_of_this_platform() -> None:
    known = clock.counting_sleep(sys.platform)
    assert known is not None or sys.platform not in ("linux", "darwin")
    before = time.monotonic() if known is None else time.clock_gettime(known)
    now = clock.now()
    assert before <= now <= (time.monotonic() if known is None else time.clock_gettime(known))


def test_a_holder_that_wakes_past_its_lease_has_lost_it(db: Database, machine: Machine) -> None:
    lease = acquired(rowlock.try_acquire(db.url, "k", lease=60))
    assert not lease.lost
    machine.sleep(HOUR)
    check_lost(lease)
    with pytest.raises(rowlock.Lost, match="no renewal succeeded"):
        lease.release()
    # No release was sent: the database's clock has not moved, and the claim stands there.
    assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"


def test_a_loss_that_its_holder_sees_first_is_told_once(db: Database, machine: Machine) -> None:
    told: queue.Queue[rowlock.Lost] = queue.Queue()
    with watch_held_up():
        lease = acquired(rowlock.lock(db.url, "k", lease=60, on_lost=told.put).acquire())
        machine.sleep(HOUR)
        with pytest.raises(rowlock.Lost, match="no renewal succeeded"):
            lease.release()
    assert told.get(timeout=60).key == "k"
    eventually(lambda: not _WATCH._tasks)
    assert told.empty()
    # An end that was no loss is not told.
    with watch_held_up():
        with rowlock.lock(db.url, "l", lease=60, on_lost=told.put):
            pass
        machine.sleep(HOUR)
    eventually(lambda: not _WATCH._tasks)
    assert told.empty()


@contextmanager
def watch_held_up() -> Generator[None, None, None]:
    """What watches deadlines looks at none in the block."""
    goes_on = threading.Event()
    _WATCH._inbox.put(lambda: goes_on.wait(60))
    try:
        yield
    finally:
        goes_on.set()


def test_a_block_that_wakes_past_its_lease_reports_it(db: Database, machine: Machine) -> None:
    with pytest.raises(rowlock.Lost), rowlock.lock(db.url, "k", lease=60):
        machine.sleep(HOUR)
    assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"


def test_a_loss_in_a_sleep_is_seen_without_being_asked_for(db: Database, machine: Machine) -> None:
    lease = acquired(rowlock.try_acquire(db.url, "k", lease=86400))
    before = expiry(db)
    machine.sleep(2 * 86400)
    eventually(lambda: lease._state.why_lost is not None)  # The renewal is due in eight hours.
    eventually(lambda: not lease._on.renewals._tasks)
    assert expiry(db) == before, "the lease was not renewed"


def test_a_lease_that_outlasts_the_sleep_is_renewed_at_once(db: Database, machine: Machine) -> None:
    lease = acquired(rowlock.try_acquire(db.url, "k", lease=86400))
    before, sent = expiry(db), lease._state.sent
    machine.sleep(43200)  # The renewal was due in eight hours, and the lease ends in 23.
    eventually(lambda: lease._state.sent > sent)
    assert expiry(db) > before
    assert not lease.lost
    lease.release()


def expiry(db: Database) -> Any:
    return db.execute("SELECT expires_at FROM t_resource_lock WHERE key_resource = 'k'")[0][0]


def test_a_sleep_ends_the_renewals_of_a_lease(machine: Machine) -> None:
    fake = Fake(lambda *_: "done")
    lease = hold(fake, state(86400.0))
    machine.sleep(2 * 86400)
    eventually(lambda: not is_renewed(lease._on))
    assert lease._state.why_lost is not None
    check_lost(lease)
    with pytest.raises(rowlock.Lost):
        lease.abandon()
    assert fake.requests == []


def test_a_renewal_is_due_after_a_third_of_the_lease(machine: Machine) -> None:
    held = state(60.0)
    steps = renewing(held, lambda _: None)
    request, pauses = until(steps, machine)
    assert request.kind == "renew"
    assert sum(pauses) == pytest.approx(20, abs=1)
    # The machine sleeps during the next pause: nothing follows.
    pause = steps.send(["done"])
    assert isinstance(pause, Pause)
    machine.sleep(HOUR)
    assert list(islice(steps, 9)) == []
    assert held.why_lost is not None


def test_a_loop_reads_the_clock_each_second_of_a_pause(machine: Machine) -> None:
    """A pause of hours is over when the clock says so, though the thread has slept a second."""
    over, looks = threading.Event(), list[float]()

    class Watched(Loop):
        def _time_left(self, idle_until: float) -> float:
            left = super()._time_left(idle_until)
            looks.append(left)
            return left

    def pauses() -> Steps[None]:
        yield Pause(HOUR)
        over.set()

    loop = Watched("rowlock test")
    loop.run(Task(pauses(), 0.0))
    assert not over.wait(2.5), "it is over before its time"
    began = time.monotonic()
    machine.sleep(HOUR)
    assert over.wait(PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2
    assert max(looks) <= 1.0


def test_a_renewal_whose_reply_is_read_after_a_sleep_revives_nothing(machine: Machine) -> None:
    held = state(60.0)
    steps = renewing(held, lambda _: None)
    until(steps, machine)
    machine.sleep(HOUR)
    step: Any = steps.send(["done"])
    assert isinstance(step, Pause)
    assert list(islice(steps, 9)) == []
    assert held.lost
    assert held.sent + HOUR < machine.now()


def test_a_claim_whose_reply_is_read_after_a_sleep_is_not_held(machine: Machine) -> None:
    """With a wait that is not over, the same holder claims again."""
    steps = acquiring(Terms("k", lease=60), 2 * HOUR)
    first, _ = until(steps, machine)
    machine.sleep(HOUR)
    assert isinstance(steps.send([granted(first.requests[0])]), Pause)
    second, _ = until(steps, machine)
    assert second == first
    acquired = ended(steps, [granted(second.requests[0])])
    assert isinstance(acquired, Acquired)
    assert not acquired.state.lost


def test_a_wait_for_a_min_interval_counts_the_sleep(machine: Machine) -> None:
    interval = rowlock.Refusal("k", "within_min_interval", retry_after=HOUR)
    asked = threading.Event()

    def answer(_: str, request: Any) -> Any:
        if asked.is_set():
            return granted(request)
        asked.set()
        return interval

    fake = Fake(answer)
    on = database(fake)
    request = Request(wait_of(2 * HOUR))
    on.acquire(One(Terms("k", min_interval=HOUR)), request)
    assert asked.wait(PATIENCE)
    eventually(lambda: on.requests._pauses)
    assert not request.asking.result.done()
    machine.sleep(HOUR)
    acquired = request.asking.result.result(PATIENCE)
    assert isinstance(acquired, Acquired)
    assert [kind for kind, _ in fake.requests] == ["claim", "claim"]
    acquired.state.drop()


def ended(steps: Generator[Any, Any, Any], result: Any) -> Any:
    with pytest.raises(StopIteration) as end:
        steps.send(result)
    return end.value.value
