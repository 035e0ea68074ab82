"""What the tests of other lock libraries assert of a lock, asserted of both clients."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any

import pytest
from conftest import Database
from peers import (
    ask,
    begin,
    block,
    eventually,
    free_by_force,
    granted,
    on_both_clients,
    refused,
    row_locked,
)

import rowlock
import rowlock.aio


# redis-py: the row has the token from the acquisition to the release.
@on_both_clients
async def test_a_lock_is_recorded_with_its_token_until_its_release(
    locks: Any, db: Database
) -> None:
    lease = await granted(locks.lock("k"))
    shown = db.show("k")
    assert (shown["state"], shown["token"]) == ("held", lease.token)
    await ask(lease.release)
    assert db.show("k")["state"] == "free"


# redis-py: the lock shows its key, and the holder its key and its token.
@on_both_clients
async def test_the_key_and_the_token_are_exposed(locks: Any, db: Database) -> None:
    lock = locks.lock("k")
    lease = await granted(lock)
    assert (lock.key, lease.key, lease.claim.key) == ("k", "k", "k")
    assert lease.claim.token == lease.token > 0
    await ask(lease.release)


# redis-py: locked is true for as long as the key is held.
@on_both_clients
async def test_locked_is_true_while_the_key_is_held(locks: Any, db: Database) -> None:
    lock, other = locks.lock("k"), locks.lock("k")
    assert [await ask(one.locked) for one in (lock, other)] == [False, False]
    lease = await granted(lock)
    assert [await ask(one.locked) for one in (lock, other)] == [True, True]
    await ask(lease.release)
    assert [await ask(one.locked) for one in (lock, other)] == [False, False]


# redis-py: owned is true for the present holder alone.
@on_both_clients
async def test_owned_is_true_for_the_present_holder_alone(locks: Any, db: Database) -> None:
    first = await granted(locks.lock("k"))
    assert await ask(first.owned) is True
    await ask(first.release)
    assert await ask(first.owned) is False
    second = await granted(locks.lock("k"))
    assert [await ask(one.owned) for one in (first, second)] == [False, True]
    await ask(second.release)
    assert [await ask(one.owned) for one in (first, second)] == [False, False]


# redis-py: a holder whose time is over does not own the key, though no other has taken it.
@on_both_clients
async def test_owned_is_false_after_the_lease_has_ended(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k", lease=1))
    with row_locked(db, "k"):  # No renewal succeeds.
        await eventually(lambda: lease.lost)
    await eventually(lambda: db.show("k")["state"] == "expired")
    assert await ask(lease.owned) is False


# redis-py: owned is false after the holder has ended its claim, in whichever way.
@on_both_clients
async def test_owned_is_false_after_the_claim_was_abandoned(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k"))
    await ask(lease.abandon)
    assert await ask(lease.owned) is False


# redis-py: of two locks on a key, each is refused while the other is held.
@on_both_clients
async def test_competing_locks_refuse_each_other(locks: Any, db: Database) -> None:
    one, other = locks.lock("k"), locks.lock("k")
    lease = await granted(one)
    assert (await refused(other)).reason == "held"
    await ask(lease.release)
    lease = await granted(other)
    assert (await refused(one)).reason == "held"
    await ask(lease.release)


# redis-py: the timeout is the time to live of the row, and may have a fraction.
@on_both_clients
async def test_the_lease_is_the_time_until_the_key_is_free(locks: Any, db: Database) -> None:
    for length in (60, 59.5):
        lease = await granted(locks.lock("k", lease=length))
        left = (await refused(locks.lock("k"))).retry_after
        assert left is not None
        assert length - 15 < left <= length
        await ask(lease.release)


# redis-py: a wait with a limit ends refused, and not before the limit.
@on_both_clients
async def test_a_wait_ends_refused_at_its_limit(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k"))
    began = time.monotonic()
    assert (await refused(locks.lock("k", wait=0.4))).reason == "held"
    assert (await refused(locks.lock("k"), 0.4)).reason == "held"
    assert 0.8 <= time.monotonic() - began < 10
    await ask(lease.release)


# redis-py: a lock that blocks without a limit waits for the release.
@on_both_clients
async def test_an_endless_wait_ends_with_the_release(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k"))
    waiting = begin(locks.lock("k", wait=None).acquire)
    assert not (await asyncio.wait([waiting], timeout=0.5))[0]
    await ask(lease.release)
    following = await waiting
    assert following.token > lease.token
    await ask(following.release)


# redis-py: a with block holds the key, and frees it at its end.
@on_both_clients
async def test_a_block_holds_the_key_to_its_end(locks: Any, db: Database) -> None:
    async with block(locks.lock("k", wait=0.2)) as lease:
        assert db.show("k")["token"] == lease.token
        assert await ask(locks.lock("k").locked)
    assert not await ask(locks.lock("k").locked)


# redis-py: a with block whose lock is not acquired raises, and the error names the lock.
@on_both_clients
async def test_a_block_that_is_refused_raises_and_names_its_key(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k"))
    with pytest.raises(rowlock.Refused) as raised:
        async with block(locks.lock("k", wait=0.1)):
            pytest.fail("the block was entered")
    assert raised.value.refusal.key == "k"
    await ask(lease.release)


# redis-py: a with block whose lock is lost raises at its end.
@on_both_clients
async def test_a_block_that_has_lost_its_key_raises(locks: Any, db: Database) -> None:
    with pytest.raises(rowlock.Lost) as raised:
        async with block(locks.lock("k")):
            free_by_force(db, "k")
    assert raised.value.key == "k"


# redis-py: the release of a lost lock raises, and leaves the next holder's claim untouched.
@on_both_clients
async def test_a_release_without_the_claim_is_refused(locks: Any, db: Database) -> None:
    first = await granted(locks.lock("k"))
    free_by_force(db, "k")
    second = await granted(locks.lock("k"))
    with pytest.raises(rowlock.Lost):
        await ask(first.release)
    assert await ask(second.owned)
    await ask(second.release)


# redis-py: an extension sets the time to live anew, and it may have a fraction.
@on_both_clients
async def test_an_extension_lengthens_the_lease(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k", lease=20))
    await ask(lease.extend, 90.5)
    left = (await refused(locks.lock("k"))).retry_after
    assert left is not None
    assert 60 < left <= 90.5
    assert 60 < lease.time_left <= 90.5
    await ask(lease.release)


# redis-py: no extension of a lock that was released, or that another holds.
@on_both_clients
async def test_an_extension_without_the_claim_raises(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k"))
    await ask(lease.release)
    with pytest.raises(rowlock.Lost):
        await ask(lease.extend, 60)
    lease = await granted(locks.lock("k"))
    free_by_force(db, "k")
    with pytest.raises(rowlock.Lost):
        await ask(lease.extend, 60)
    assert not await ask(locks.lock("k").locked)


# redis-py: a release whose task is cancelled leaves no key that cannot be freed.
def test_a_release_whose_task_is_cancelled_goes_on(db: Database) -> None:
    async def work() -> None:
        for pause in (None, 0.0, 0.001):
            lease = await granted(rowlock.aio.lock(db.url, "k"))
            task = asyncio.create_task(lease.release())
            if pause is not None:
                await asyncio.sleep(pause)
            task.cancel()
            await asyncio.wait([task])
            if pause is None:  # It was cancelled before it began: it is repeated.
                await lease.release()
            await eventually(lambda: db.show("k")["state"] == "free", within=10)

    asyncio.run(work())


# redis-py, without thread_local: a thread releases what another has acquired.
def test_a_lease_is_released_by_another_thread(db: Database) -> None:
    with rowlock.connect(db.url) as locks:
        lease = locks.lock("k").acquire()
        assert isinstance(lease, rowlock.Lease)
        thread = threading.Thread(target=lease.release)
        thread.start()
        thread.join()
        assert not locks.lock("k").locked()


# pottery: a key that is not renewed is free after its time.
def test_a_key_that_is_not_renewed_is_free_after_its_lease(db: Database) -> None:
    async def work() -> None:
        lock, other = rowlock.lock(db.url, "k"), rowlock.aio.lock(db.url, "k")
        db.acquire("k", "--lease", "2s")
        assert [lock.locked(), await other.locked()] == [True, True]
        await eventually(lambda: db.show("k")["state"] == "expired")
        assert [lock.locked(), await other.locked()] == [False, False]

    asyncio.run(work())


# pottery: an acquisition that blocks is granted when the time of the holder ends.
@on_both_clients
async def test_a_waiter_is_granted_the_key_when_a_lease_ends(locks: Any, db: Database) -> None:
    claim = db.acquire("k", "--lease", "1s")
    lease = await granted(locks.lock("k", wait=30))
    assert lease.taken_over_from.token == claim["token"]
    await ask(lease.release)


# pottery: the same lock is refused a second time, as it counts no re-entry.
@on_both_clients
async def test_the_same_lock_is_not_acquired_twice(locks: Any, db: Database) -> None:
    lock = locks.lock("k")
    lease = await granted(lock)
    assert (await refused(lock)).reason == "held"
    assert await ask(lease.owned)
    await ask(lease.release)


# pottery: the second release of a lock raises.
@on_both_clients
async def test_a_second_release_raises(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k"))
    await ask(lease.release)
    with pytest.raises(rowlock.Lost):
        await ask(lease.release)


# pottery, asyncio: a block that outlasts its key raises. Here its task is cancelled at once.
def test_a_block_of_a_task_ends_when_its_key_is_lost(db: Database) -> None:
    async def work() -> None:
        began = time.monotonic()
        with pytest.raises(rowlock.Lost):  # noqa: PT012
            async with rowlock.aio.lock(db.url, "k", lease=2):
                free_by_force(db, "k")
                await asyncio.sleep(60)
        assert time.monotonic() - began < 30

    asyncio.run(work())


# pottery: a failing server is an error where the caller asks for errors: here always.
@on_both_clients
async def test_a_failing_database_is_an_error_and_no_answer(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("k"))
    db.execute("ALTER TABLE t_resource_lock RENAME TO renamed")
    for method in (locks.lock("k").try_acquire, locks.lock("k").locked, lease.owned):
        with pytest.raises(rowlock.NotInstalled):
            await ask(method)
    with pytest.raises(rowlock.NotInstalled):
        await ask(lease.extend, 60)
    db.execute("ALTER TABLE renamed RENAME TO t_resource_lock")
    await ask(lease.release)


# pottery: of so many acquisitions at once, one is granted at most.
@on_both_clients
async def test_of_acquisitions_at_once_one_is_granted(locks: Any, db: Database) -> None:
    for count in range(1, 11):
        tasks = [begin(locks.lock(f"k{count}").try_acquire) for _ in range(count)]
        leases = [one for one in await asyncio.gather(*tasks) if one]
        assert len(leases) == 1
        await ask(leases[0].release)


# pottery, synchronize: calls of a decorated function run after each other.
@on_both_clients
async def test_calls_of_a_job_do_not_overlap(locks: Any, db: Database) -> None:
    runs: list[tuple[float, float]] = []

    def thread(lease: Any) -> None:
        began = time.monotonic()
        time.sleep(0.1)
        runs.append((began, time.monotonic()))

    async def task(lease: Any) -> None:
        began = time.monotonic()
        await asyncio.sleep(0.1)
        runs.append((began, time.monotonic()))

    work = task if isinstance(locks, rowlock.aio.Locks) else thread
    job = locks.job("k", wait=None)(work)
    await asyncio.gather(*(ask(job) for _ in range(3)))
    assert len(runs) == 3
    assert all(early[1] <= late[0] for early, late in itertools.pairwise(sorted(runs)))


# pottery: the representation names the key.
@on_both_clients
async def test_the_representation_of_a_lease_names_its_key(locks: Any, db: Database) -> None:
    lease = await granted(locks.lock("printer"))
    assert "printer" in repr(lease)
    await ask(lease.release)
