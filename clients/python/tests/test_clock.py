"""A machine that sleeps while a lease is held: the clock jumps, and no pause has counted it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Generator
from itertools import islice
from typing import Any

import pytest
from conftest import Database, acquired, refused
from test_protocol import Fake, granted, state

import rowlock
import rowlock.aio
from rowlock import clock, protocol
from rowlock import lease as leases
from rowlock.aio_session import AsyncSession
from rowlock.protocol import Call, Pause, State, Terms

HOUR = 3600.0
#: Much longer than any look at the clock, and much shorter than the pause until a renewal.
PATIENCE = 60.0
POSTGRES = pytest.mark.parametrize("db", ["postgres"], indirect=True)


class Machine:
    """Its clock counts the sleep. The pauses of its threads and event loops do not."""

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


class AsyncFake(AsyncSession):
    """Answers as a :class:`Fake` does, to an event loop."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake

    async def change(self, change: str, claim: rowlock.Claim, *arguments: Any) -> str:
        answer: str = self.fake.change(change, claim, *arguments)
        return answer

    async def close(self) -> None:
        self.fake.close()


def until(steps: Generator[Call | Pause, Any, Any], machine: Machine) -> tuple[Call, list[float]]:
    """Pauses as long as the steps want. Returns the next request, and the pauses before it."""
    pauses: list[float] = []
    step = next(steps)
    while isinstance(step, Pause):
        pauses.append(step.seconds)
        assert len(pauses) < 10_000, "the pauses end at no time of the clock"
        machine.sleep(step.seconds)
        step = next(steps)
    return step, pauses


def check_lost(lease: rowlock.Lease | rowlock.aio.Lease) -> None:
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


def test_a_block_that_wakes_past_its_lease_reports_it(db: Database, machine: Machine) -> None:
    with pytest.raises(rowlock.Lost), rowlock.lock(db.url, "k", lease=60):
        machine.sleep(HOUR)
    assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"


def test_a_loss_in_a_sleep_is_seen_without_being_asked_for(db: Database, machine: Machine) -> None:
    lease = acquired(rowlock.try_acquire(db.url, "k", lease=86400))
    before = expiry(db)
    machine.sleep(2 * 86400)
    lease._thread.join(PATIENCE)  # The renewal is due in eight hours.
    assert not lease._thread.is_alive()
    assert lease._state.why_lost is not None
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


def eventually(holds: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE} s"
        time.sleep(0.02)


@POSTGRES
def test_a_task_that_wakes_past_its_lease_has_lost_it(db: Database, machine: Machine) -> None:
    async def work() -> None:
        lease = await rowlock.aio.try_acquire(db.url, "k", lease=86400)
        assert isinstance(lease, rowlock.aio.Lease)
        await asyncio.sleep(0)  # Its task begins to pause.
        before = expiry(db)
        machine.sleep(2 * 86400)
        check_lost(lease)
        await asyncio.wait([lease._task], timeout=PATIENCE)
        assert lease._task.done()
        with pytest.raises(rowlock.Lost, match="no renewal succeeded"):
            await lease.release()
        assert expiry(db) == before
        assert not await rowlock.aio.try_acquire(db.url, "k")

    asyncio.run(work())


def test_a_sleep_ends_the_renewals_of_a_thread(machine: Machine) -> None:
    fake = Fake(lambda *_: "done")
    lease = leases.Lease("sqlite:/nowhere", fake, state(86400.0), None)
    machine.sleep(2 * 86400)
    lease._thread.join(PATIENCE)
    assert not lease._thread.is_alive()
    assert lease._state.why_lost is not None
    check_lost(lease)
    with pytest.raises(rowlock.Lost):
        lease.abandon()
    assert fake.requests == []


def test_a_sleep_ends_the_renewals_of_a_task(machine: Machine) -> None:
    fake = Fake(lambda *_: "done")

    async def work() -> None:
        lease = rowlock.aio.Lease("postgres:///nowhere", AsyncFake(fake), state(86400.0), None)
        await asyncio.sleep(0)
        machine.sleep(2 * 86400)
        await asyncio.wait([lease._task], timeout=PATIENCE)
        assert lease._task.done()
        assert lease._state.why_lost is not None
        check_lost(lease)
        with pytest.raises(rowlock.Lost):
            await lease.abandon()

    asyncio.run(work())
    assert fake.requests == []


def test_a_renewal_that_is_due_after_a_sleep_is_sent_by_a_task(machine: Machine) -> None:
    fake = Fake(lambda *_: "done")

    async def work() -> None:
        lease = rowlock.aio.Lease("postgres:///nowhere", AsyncFake(fake), state(86400.0), None)
        await asyncio.sleep(0)
        machine.sleep(43200)
        for _ in range(round(PATIENCE / 0.02)):
            if fake.requests:
                break
            await asyncio.sleep(0.02)
        assert not lease.lost
        await lease.release()

    asyncio.run(work())
    assert [name for name, _ in fake.requests] == ["renew", "release"]


def test_the_clock_is_read_each_second_of_a_pause(machine: Machine) -> None:
    held = state(60.0)
    steps = protocol.renewing(held)
    request, pauses = until(steps, machine)
    assert request.arguments[0] == "renew"
    assert max(pauses) <= 1.0
    assert sum(pauses) == pytest.approx(20, abs=1)
    # The machine sleeps during the next pause: nothing follows.
    pause = steps.send("done")
    assert isinstance(pause, Pause)
    machine.sleep(HOUR)
    assert list(islice(steps, 9)) == [Pause(0.0)]
    assert held.why_lost is not None


def test_a_renewal_whose_reply_is_read_after_a_sleep_revives_nothing(machine: Machine) -> None:
    held = state(60.0)
    steps = protocol.renewing(held)
    until(steps, machine)
    machine.sleep(HOUR)
    step: Any = steps.send("done")
    assert isinstance(step, Pause)
    assert list(islice(steps, 9)) == []
    assert held.lost
    assert held.sent + HOUR < machine.now()


def test_a_claim_whose_reply_is_read_after_a_sleep_is_not_held(machine: Machine) -> None:
    """With a wait that is not over, the same holder claims again."""
    steps = protocol.acquiring(Terms("k", lease=60), "h", 2 * HOUR)
    first, _ = until(steps, machine)
    machine.sleep(HOUR)
    assert isinstance(steps.send(granted(first.arguments)), Pause)
    second, _ = until(steps, machine)
    assert second == first
    acquired = ended(steps, granted(second.arguments))
    assert isinstance(acquired, tuple)
    held: State = acquired[0]
    assert not held.lost


def test_a_wait_for_a_window_counts_the_sleep(machine: Machine) -> None:
    steps = protocol.acquiring(Terms("k", min_interval=HOUR), "h", 2 * HOUR)
    first, _ = until(steps, machine)
    window = rowlock.Refusal("k", "within_window", retry_after=HOUR)
    pause: Any = steps.send(window)
    assert isinstance(pause, Pause)
    machine.sleep(HOUR)
    again, pauses = until(steps, machine)
    assert again == first
    assert sum(pauses) <= 1.0


def ended(steps: Generator[Any, Any, Any], result: Any) -> Any:
    with pytest.raises(StopIteration) as end:
        steps.send(result)
    return end.value.value
