"""What the suites of ShedLock and DistributedLock assert of a lock, asserted of both clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Database
from peers import (
    ask,
    begin,
    block,
    cancel_at_random_moments,
    eventually,
    free_by_force,
    granted,
    on_both_clients,
    refused,
    row_locked,
)

import rowlock
import rowlock.aio

WORKER = str(Path(__file__).parent / "worker.py")


# ShedLock: locks of two names are independent.
@on_both_clients
async def test_locks_on_two_keys_are_independent(locks: Any, db: Database) -> None:
    leases = [await granted(locks.lock(key)) for key in ("one", "other")]
    for lease in leases:
        await ask(lease.release)


# ShedLock: a key is locked right after its release, ten times, and refused in between.
@on_both_clients
async def test_a_key_is_acquired_right_after_each_release(locks: Any, db: Database) -> None:
    tokens = []
    for _ in range(10):
        lease = await granted(locks.lock("k"))
        assert (await refused(locks.lock("k"))).reason == "held"
        await ask(lease.release)
        tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


# ShedLock, lockAtLeastFor: after the release the key is refused until its time has passed.
@on_both_clients
async def test_a_key_is_refused_within_the_minimum_interval(locks: Any, db: Database) -> None:
    key = type(locks).__module__  # The interval counts from the claims of each client.
    lock = locks.lock(key, min_interval=600)
    await ask((await granted(lock)).release)
    refusal = await refused(lock)
    assert refusal.reason == "within_min_interval"
    assert refusal.retry_after is not None
    assert 300 < refusal.retry_after <= 600
    lease = await granted(locks.lock(key, min_interval=1, wait=30))
    await ask(lease.release)


# ShedLock, StorageBasedLockProvider: a key has one row, which each claim updates.
@on_both_clients
async def test_a_key_has_one_row(locks: Any, db: Database) -> None:
    for _ in range(3):
        await ask((await granted(locks.lock("k"))).release)
    rows = db.execute("SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = 'k'")
    assert rows[0][0] == 1


# ShedLock, StorageBasedLockProvider: a claim outlasts the provider's cache, here its sessions.
@on_both_clients
async def test_a_claim_outlasts_the_close_of_its_locks(locks: Any, db: Database) -> None:
    client = sys.modules[type(locks).__module__.replace(".lock", "")]
    other = client.connect(db.url)
    lease = await granted(other.lock("k"))
    await ask(getattr(other, "aclose", None) or other.close)
    assert (await refused(locks.lock("k"))).reason == "held"
    await ask(lease.release)
    await ask((await granted(locks.lock("k"))).release)


# ShedLock, FuzzTester: threads raise two counters, each under its own key.
def test_threads_count_exactly(db: Database) -> None:
    counters = {"one": 0, "two": 0}
    threads, rounds, short = 8, 15, 4

    def count(key: str, times: int) -> None:
        for _ in range(times):
            with locks.lock(key, wait=None):
                number = counters[key]
                time.sleep(0.001)
                counters[key] = number + 1

    with rowlock.connect(db.url) as locks, ThreadPoolExecutor(threads) as pool:
        keys = ["one" if number % 2 == 0 else "two" for number in range(threads)]
        times = [short] + [rounds] * (threads - 1)
        for _ in pool.map(count, keys, times):
            pass
    half = threads // 2
    assert counters == {"one": (half - 1) * rounds + short, "two": half * rounds}


# ShedLock: an extension outlasts the original duration, also after others.
def test_an_extended_key_is_held_after_its_original_lease(db: Database) -> None:
    with rowlock.connect(db.url) as locks:
        lease = locks.lock("k", lease=1).acquire()
        assert isinstance(lease, rowlock.Lease)
        for _ in range(3):
            lease.extend(60)
        with row_locked(db, "k"):  # No renewal succeeds: the extension alone keeps the key.
            time.sleep(1.5)
        assert not lease.lost
        assert locks.lock("k").locked()
        lease.release()
        assert not locks.lock("k").locked()


# ShedLock: a later renewal does not shorten an extended lease.
def test_a_renewal_does_not_shorten_an_extended_lease(db: Database) -> None:
    with rowlock.connect(db.url) as locks:
        lease = locks.lock("k", lease=1).acquire()
        assert isinstance(lease, rowlock.Lease)
        lease.extend(60)
        time.sleep(1)
        refusal = locks.lock("k").acquire()
        assert isinstance(refusal, rowlock.Refusal)
        assert refusal.retry_after is not None
        assert refusal.retry_after > 30
        lease.release()


# ShedLock: a lock whose time is over is not extended.
@on_both_clients
async def test_a_lease_that_has_ended_is_not_extended(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k", lease=1))
    with row_locked(db, "k"):
        await eventually(lambda: lease.lost)
    with pytest.raises(rowlock.Lost):
        await ask(lease.extend, 60)
    # A renewal in flight may keep the row for another lease of 1 s. The extension did not.
    await ask((await granted(locks.lock("k"), 10)).release)


# ShedLock, KeepAliveLockProvider: a lock is kept for longer than its duration.
def test_a_lease_is_renewed_past_its_duration(db: Database) -> None:
    async def work() -> None:
        async with rowlock.aio.lock(db.url, "task", lease=2) as one:
            with rowlock.lock(db.url, "thread", lease=2) as other:
                await asyncio.sleep(3.5)
                assert [one.lost, other.lost] == [False, False]
                assert await one.owned()
                assert other.owned()

    asyncio.run(work())


# DistributedLock: a handle that is disposed of twice has no effect on the next one.
@on_both_clients
async def test_a_released_lease_has_no_effect_on_the_next(locks: Any, db: Database) -> None:
    async with block(locks.lock("k")) as first:
        await ask(first.release)
        second = await granted(locks.lock("k"))
    # The end of the block came after the release: it did nothing.
    assert await ask(second.owned)
    await ask(second.release)


# DistributedLock: keys differ by the case of their letters.
@on_both_clients
async def test_keys_are_case_sensitive(locks: Any, db: Database) -> None:
    leases = [await granted(locks.lock(key)) for key in ("A1_a", "A1_A")]
    for lease in leases:
        await ask(lease.release)


# DistributedLock: any name is usable, also one of backslashes. Here it has 255 bytes at most.
@on_both_clients
async def test_a_name_of_backslashes_is_a_key(locks: Any, db: Database) -> None:
    for key in ("a" * 255, "\\" * 5, "\\" * 255):
        lease = await granted(locks.lock(key))
        assert (await refused(locks.lock(key))).reason == "held"
        await ask(lease.release)


# DistributedLock: of a hundred tasks that take the lock, one is in at a time.
def test_of_many_tasks_one_holds_the_key(db: Database) -> None:
    inside, most, done = 0, 0, 0

    async def work() -> None:
        async def one() -> None:
            nonlocal inside, most, done
            async with locks.lock("k", wait=None):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.005)
                inside -= 1
                done += 1

        async with rowlock.aio.connect(db.url) as locks:
            await asyncio.gather(*(one() for _ in range(50)))

    asyncio.run(work())
    assert (most, done) == (1, 50)


# DistributedLock: the cancellation of a waiter ends its wait, and leaves the holder alone.
def test_a_cancelled_waiter_leaves_the_holder_alone(db: Database) -> None:
    async def work() -> None:
        async with rowlock.aio.lock(db.url, "k") as lease:
            waiting = begin(rowlock.aio.lock(db.url, "k", wait=None).acquire)
            assert not (await asyncio.wait([waiting], timeout=0.2))[0]
            waiting.cancel()
            await asyncio.wait([waiting], timeout=10)
            assert waiting.cancelled()
            assert await lease.owned()

    asyncio.run(work())


# DistributedLock: an acquisition that is cancelled before it begins is cancelled.
def test_an_acquisition_that_is_cancelled_at_once_holds_nothing(db: Database) -> None:
    async def work() -> None:
        waiting = begin(rowlock.aio.lock(db.url, "k").acquire)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert not await rowlock.aio.lock(db.url, "k").locked()

    asyncio.run(work())


@pytest.mark.parametrize("is_held", [False, True])
def test_acquisitions_cancelled_at_random_moments_hold_nothing(db: Database, is_held: bool) -> None:
    """DistributedLock cancels one waiter. Here 30 end, on a free key and on a held one."""

    async def work() -> None:
        async with rowlock.aio.connect(db.url) as locks:
            lease = await granted(locks.lock("k")) if is_held else None
            await cancel_at_random_moments(locks.lock("k", wait=60).acquire)
            if lease is not None:
                assert await lease.owned()
                await lease.release()
            # What is in flight is put back soon, and not at the end of a lease of 30 s.
            last = await granted(locks.lock("k", wait=10))
            assert last.taken_over_from is None
            await last.release()

    asyncio.run(work())


# DistributedLock, HandleLostToken: it is told when the handle is lost.
@on_both_clients
async def test_a_loss_is_told(locks: Any, db: Database) -> None:
    told: list[rowlock.Lost] = []
    lease = await granted(locks.lock("k", lease=2, on_lost=told.append))
    assert not lease.lost
    free_by_force(db, "k")
    await eventually(lambda: told)
    assert lease.lost
    assert (len(told), told[0].key, told[0].token) == (1, "k", lease.token)


# DistributedLock, HandleLostToken: nothing is told of a release, also while it is watched.
@on_both_clients
async def test_a_release_is_not_told_as_a_loss(locks: Any, db: Database) -> None:
    told: list[rowlock.Lost] = []
    lease = await granted(locks.lock("k", lease=0.5, on_lost=told.append))
    await ask(lease.release)
    await asyncio.sleep(1)
    assert not told
    assert not lease.lost


# DistributedLock, TestCrossProcessAbandonment: the key of a holder that has abandoned it is free.
@on_both_clients
async def test_an_abandoned_key_is_taken_over_at_once(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k", lease=600))
    await ask(lease.abandon)
    following = await granted(locks.lock("k", wait=10))
    assert following.taken_over_from.token == lease.token
    await ask(following.release)


# DistributedLock, TestCrossProcessAbandonmentWithKill: no key of a process that is killed is kept.
def test_a_killed_process_does_not_keep_the_key(db: Database) -> None:
    command = [sys.executable, WORKER, "hold", db.url, "k", "1.5"]

    async def work() -> None:
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        token = int(holder.stdout.readline().split()[1])
        lock = rowlock.aio.lock(db.url, "k", wait=30)
        assert (await refused(lock, 0)).by == "python"
        waiting = begin(lock.acquire)
        holder.kill()
        holder.communicate()
        lease = await waiting
        assert lease.taken_over_from.token == token
        await lease.release()

    asyncio.run(work())


# DistributedLock: processes exclude each other. Here they are forks of this one.
def test_forked_processes_count_exactly(db: Database, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    with rowlock.connect(db.url) as locks:
        if db.name != "sqlite":  # Whose open file no child may use.
            with locks.lock("k"):
                pass  # The sessions are open at the fork.

        def count() -> bool:
            for _ in range(5):
                with locks.lock("k", wait=60):
                    number = int(counter.read_text())
                    time.sleep(0.005)
                    counter.write_text(str(number + 1))
            return True

        children = [forked(count) for _ in range(4)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert counter.read_text() == "20"


# DistributedLock: the handle is its process's own. A fork has no part in it.
def test_a_fork_has_no_part_in_the_claim(db: Database) -> None:
    with rowlock.connect(db.url) as locks, locks.lock("k") as lease:

        def look() -> bool:
            with contextlib.suppress(rowlock.Lost):
                lease.release()
                return False
            if db.name == "sqlite":
                with contextlib.suppress(rowlock.Error):
                    locks.lock("k").try_acquire()
                    return False
                return lease.lost
            return lease.lost and not locks.lock("k").try_acquire()

        assert os.waitpid(forked(look), 0)[1] == 0
        assert not lease.lost
        assert lease.owned()


def forked(work: Callable[[], bool]) -> int:
    """Runs work in a fork, whose exit status is zero if it returns true."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = 0 if work() else 2
    finally:
        os._exit(status)
