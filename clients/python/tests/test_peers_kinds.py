"""What DistributedLock's suites assert of readers, writers and semaphores, and sets of keys."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import Database
from peers import ask, begin, cancel_at_random_moments, granted, on_both_clients, refused

import rowlock
import rowlock.aio

#: How each kind is asked for.
KINDS: dict[str, Callable[[Any], Any]] = {
    "reader": lambda locks: locks.read_write("n", wait=60).read(),
    "writer": lambda locks: locks.read_write("n", wait=60).write(),
    "permit": lambda locks: locks.semaphore("n", 2, wait=60),
    "set": lambda locks: locks.lock_all(["n", "o", "p"], wait=60),
}


async def is_waiting(task: asyncio.Task[Any], seconds: float = 0.3) -> bool:
    return not (await asyncio.wait([task], timeout=seconds))[0]


# Readers and writers of DistributedLock: many read at a time.
@on_both_clients
async def test_readers_share_a_name(locks: Any, db: Database) -> None:
    name = locks.read_write("n")
    readers = [await granted(name.read()) for _ in range(5)]
    assert all([await ask(reader.owned) for reader in readers])
    for reader in readers:
        await ask(reader.release)


# Readers and writers of DistributedLock: no writer beside a reader.
@on_both_clients
async def test_a_reader_keeps_a_writer_out(locks: Any, db: Database) -> None:
    name = locks.read_write("n")
    reader = await granted(name.read())
    assert (await refused(name.write())).reason == "held"
    assert await ask(name.write().locked)
    await ask(reader.release)
    assert not await ask(name.write().locked)


# Readers and writers of DistributedLock: a writer waits for the last of the readers.
@on_both_clients
async def test_a_writer_waits_for_the_last_reader(locks: Any, db: Database) -> None:
    name = locks.read_write("n")
    one, other = [await granted(name.read()) for _ in range(2)]
    writing = begin(name.write().acquire, None)
    assert await is_waiting(writing)
    await ask(one.release)
    assert await is_waiting(writing)
    await ask(other.release)
    writer = await writing
    assert writer.token
    await ask(writer.release)


# Readers and writers of DistributedLock: one writes at a time, and no reader is beside it.
@on_both_clients
async def test_a_writer_keeps_all_others_out(locks: Any, db: Database) -> None:
    name = locks.read_write("n")
    writer = await granted(name.write())
    assert (await refused(name.write())).reason == "held"
    assert (await refused(name.read())).reason == "held"
    assert await ask(name.read().locked)
    await ask(writer.release)
    for side in (name.write(), name.read()):
        await ask((await granted(side)).release)


# Readers and writers of DistributedLock: a writer that waits keeps new readers out.
@on_both_clients
async def test_a_waiting_writer_keeps_new_readers_out(locks: Any, db: Database) -> None:
    name = locks.read_write("n")
    reader = await granted(name.read())
    writing = begin(name.write().acquire, None)
    while not await ask(name.read().locked):  # The writer has not yet sent its claim.
        await asyncio.sleep(0.02)
    assert (await refused(name.read())).reason == "held"
    assert await is_waiting(writing, 0)
    await ask(reader.release)
    await ask((await writing).release)
    await ask((await granted(name.read())).release)


# Readers and writers of DistributedLock, upgradeable: a reader waits for the writer's end.
@on_both_clients
async def test_a_reader_waits_for_the_writer(locks: Any, db: Database) -> None:
    name = locks.read_write("n")
    writer = await granted(name.write())
    reading = begin(name.read().acquire, None)
    assert await is_waiting(reading)
    await ask(writer.release)
    reader = await reading
    assert reader.writer_token >= writer.token
    await ask(reader.release)


# Readers and writers of DistributedLock: a second disposal has no effect on others.
@on_both_clients
async def test_a_second_release_of_a_reader_has_no_effect(locks: Any, db: Database) -> None:
    name = locks.read_write("n")
    one, other = [await granted(name.read()) for _ in range(2)]
    await ask(one.release)
    with pytest.raises(rowlock.Lost):
        await ask(one.release)
    assert (await refused(name.write())).reason == "held"
    await ask(other.release)


# Readers and writers of DistributedLock: an abandoned handle keeps no writer out.
@on_both_clients
async def test_an_abandoned_reader_keeps_no_writer_out(locks: Any, db: Database) -> None:
    name = locks.read_write("n", lease=600)
    await ask((await granted(name.read())).abandon)
    writer = await granted(name.write(), 10)
    await ask(writer.abandon)
    await ask((await granted(name.read(), 10)).release)


# ShedLock, FuzzTester, for readers and writers: what is written is read as a whole.
def test_threads_read_what_is_written_as_a_whole(db: Database) -> None:
    written = [0, 0]
    seen: list[tuple[int, int]] = []

    def write() -> None:
        for _ in range(5):
            with name.write():
                number = written[0]
                written[0] = number + 1
                time.sleep(0.005)
                written[1] = number + 1

    def read() -> None:
        for _ in range(5):
            with name.read():
                first = written[0]
                time.sleep(0.005)
                seen.append((first, written[1]))

    with rowlock.connect(db.url) as locks, ThreadPoolExecutor(8) as pool:
        name = locks.read_write("n", wait=None)
        for future in [pool.submit(work) for work in (write, read, read, write, read, read)]:
            future.result()
    assert written == [10, 10]
    assert len(seen) == 20
    assert all(first == second for first, second in seen)


# Semaphores of DistributedLock: the number of permits has limits.
@on_both_clients
async def test_a_semaphore_has_from_1_to_100_permits(locks: Any, db: Database) -> None:
    for count in (0, -1, 101):
        with pytest.raises(ValueError, match="permits"):
            locks.semaphore("n", count)
    with pytest.raises(TypeError, match="permits"):
        locks.semaphore("n", 1.5)


# Semaphores of DistributedLock: all permits are granted, no more, and each again after its end.
@on_both_clients
async def test_a_semaphore_grants_its_permits_and_no_more(locks: Any, db: Database) -> None:
    one, other = locks.semaphore("n", 4), locks.semaphore("n", 4)
    leases = [await granted(one)]
    await ask((await granted(other)).release)
    leases += [await granted(one) for _ in range(3)]
    assert len({lease.key for lease in leases}) == 4
    assert not await refused(other)
    assert not await refused(one)
    await ask(leases.pop().release)
    await ask((await granted(other)).release)
    for lease in leases:
        await ask(lease.release)


# Semaphores of DistributedLock: a hundred permits are held at once.
@on_both_clients
async def test_a_hundred_permits_are_held_at_once(locks: Any, db: Database) -> None:
    semaphore = locks.semaphore("n", 100, wait=30)
    leases = await asyncio.gather(*(begin(semaphore.acquire) for _ in range(100)))
    assert len({lease.key for lease in leases if lease}) == 100
    assert await ask(semaphore.locked)
    await asyncio.gather(*(begin(lease.release) for lease in leases))
    assert not await ask(semaphore.locked)


# Semaphores of DistributedLock: of many threads, so many are in as there are permits.
def test_of_many_threads_as_many_are_in_as_there_are_permits(db: Database) -> None:
    mutex, full = threading.Lock(), threading.Event()
    inside = 0
    seen: set[int] = set()

    def work(_: int) -> None:
        nonlocal inside
        for _ in range(4):
            with locks.semaphore("n", 3, wait=None):
                with mutex:
                    inside += 1
                    seen.add(inside)
                    if inside == 3:
                        full.set()
                assert full.wait(30), "three were never in together"
                time.sleep(0.005)
                with mutex:
                    inside -= 1

    with rowlock.connect(db.url) as locks, ThreadPoolExecutor(10) as pool:
        list(pool.map(work, range(10)))
    assert (seen, inside) == ({1, 2, 3}, 0)


# Semaphores of DistributedLock: the same of many tasks.
def test_of_many_tasks_as_many_are_in_as_there_are_permits(db: Database) -> None:
    inside, most, ended = 0, 0, 0

    async def work() -> None:
        full = asyncio.Event()

        async def one() -> None:
            nonlocal inside, most, ended
            async with locks.semaphore("n", 10, wait=None):
                inside += 1
                most = max(most, inside)
                if inside == 10:
                    full.set()
                await asyncio.wait_for(full.wait(), 30)
                await asyncio.sleep(0.03)
                inside -= 1
                ended += 1

        async with rowlock.aio.connect(db.url) as locks:
            await asyncio.gather(*(one() for _ in range(60)))

    asyncio.run(work())
    assert (inside, most, ended) == (0, 10, 60)


# Semaphores of DistributedLock, abandonment: an abandoned permit is granted to a waiter.
@on_both_clients
async def test_an_abandoned_permit_is_granted_again(locks: Any, db: Database) -> None:
    semaphore = locks.semaphore("n", 2, lease=600)
    leases = [await granted(semaphore) for _ in range(2)]
    waiting = begin(semaphore.acquire, None)
    assert await is_waiting(waiting)
    await ask(leases[0].abandon)
    leases[0] = await waiting
    for lease in leases:
        await ask(lease.release)


# Composite locks of DistributedLock: all are held, or none.
@on_both_clients
async def test_of_a_set_of_keys_all_are_held_or_none(locks: Any, db: Database) -> None:
    middle = await granted(locks.lock("b"))
    everything = locks.lock_all(["a", "b", "c"])
    assert (await refused(everything)).key == "b"
    assert [await ask(locks.lock(key).locked) for key in "abc"] == [False, True, False]
    await ask(middle.release)
    lease = await granted(everything)
    assert [await ask(locks.lock(key).locked) for key in "abc"] == [True, True, True]
    await ask(lease.release)
    assert [await ask(locks.lock(key).locked) for key in "abc"] == [False, False, False]


# Composite locks of DistributedLock: sets in opposite orders do not wait for each other.
@on_both_clients
async def test_sets_of_keys_in_opposite_orders_do_not_deadlock(locks: Any, db: Database) -> None:
    held: set[str] = set()

    async def take(keys: list[str]) -> None:
        for _ in range(5):
            lease = await granted(locks.lock_all(keys), 60)
            assert held.isdisjoint(keys)
            held.update(keys)
            await asyncio.sleep(0)
            held.difference_update(keys)
            await ask(lease.release)

    await asyncio.gather(*(take(keys) for keys in (["a", "b"], ["b", "a"], ["c", "b"])))


# DistributedLock, cancellation: of 30 acquisitions that end at random moments, nothing is held.
@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_acquisitions_cancelled_at_random_moments_hold_nothing(
    db: Database, kind: str, is_held: bool
) -> None:
    async def work() -> None:
        async with rowlock.aio.connect(db.url) as locks:
            # What keeps out the kind: a reader keeps a writer out, and a writer a reader.
            other = {"reader": "writer", "writer": "reader"}.get(kind, kind)
            count = 2 if kind == "permit" else 1
            holders = [await granted(KINDS[other](locks)) for _ in range(count if is_held else 0)]
            await cancel_at_random_moments(KINDS[kind](locks).acquire)
            for holder in holders:
                assert await holder.owned()
                await holder.release()
            # What is in flight is put back soon, and not at the end of a lease of 30 s.
            everything = {"reader": "writer"}.get(kind, kind)
            last = [await granted(KINDS[everything](locks), 10) for _ in range(count)]
            for lease in last:
                assert lease.taken_over_from is None
                await lease.release()

    asyncio.run(work())


# DistributedLock, cancellation: a writer that is cancelled lets the readers in again.
def test_a_cancelled_writer_lets_readers_in_again(db: Database) -> None:
    async def work() -> None:
        async with rowlock.aio.connect(db.url) as locks:
            name = locks.read_write("n")
            reader = await granted(name.read())
            writing = begin(name.write().acquire, None)
            while not await name.read().locked():
                await asyncio.sleep(0.02)
            writing.cancel()
            await asyncio.wait([writing])
            assert writing.cancelled()
            await (await granted(name.read(), 10)).release()
            await reader.release()

    asyncio.run(work())
