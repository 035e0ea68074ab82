"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psycopg
import pytest
from conftest import POSTGRES, Database

import rowlock
import rowlock.aio


def test_a_key_is_held_for_the_block(db: Database) -> None:
    async def work() -> None:
        async with rowlock.aio.lock(db.url, "k", lease=6, label="async") as lease:
            assert not await rowlock.aio.try_acquire(db.url, "k")
            await asyncio.sleep(7)
            refusal = rowlock.try_acquire(db.url, "k")
            assert isinstance(refusal, rowlock.Refusal)
            assert (refusal.reason, refusal.by) == ("held", "async")
            assert not lease.lost
            assert 0 < lease.time_left < 6
        with rowlock.lock(db.url, "k") as next_lease:
            assert next_lease.token > lease.token
            with pytest.raises(rowlock.Refused):
                async with rowlock.aio.lock(db.url, "k"):
                    pass

    asyncio.run(work())
    assert db.show("k")["status"] == "S"


def test_a_cancelled_task_abandons_its_key(db: Database) -> None:
    async def work() -> None:
        held = asyncio.Event()

        async def hold() -> None:
            async with rowlock.aio.lock(db.url, "k"):
                held.set()
                await asyncio.sleep(1000)

        task = asyncio.create_task(hold())
        await held.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        async with rowlock.aio.lock(db.url, "k") as lease:
            assert lease.taken_over_from is not None

    asyncio.run(work())


@POSTGRES
def test_a_commit_depends_on_the_claim(db: Database) -> None:
    async def work() -> None:
        async with await psycopg.AsyncConnection.connect(db.url) as connection:
            lease = await rowlock.aio.try_acquire(connection, "k")
            assert isinstance(lease, rowlock.aio.Lease)
            async with connection.transaction(), connection.cursor() as cursor:
                await lease.confirm(cursor)
            assert db.run("release", "k", "--force").returncode == 0
            with pytest.raises(rowlock.Lost):
                async with connection.transaction(), connection.cursor() as cursor:
                    await lease.confirm(cursor)
            with pytest.raises(rowlock.Lost):
                await lease.release()

    asyncio.run(work())


def test_work_that_blocks_the_loop_keeps_its_lease(db: Database) -> None:
    """A thread renews it while no task runs."""

    async def work() -> None:
        lease = await rowlock.aio.try_acquire(db.url, "k", lease=4)
        assert isinstance(lease, rowlock.aio.Lease)
        assert db.run("acquire", "k", "--wait", "6s").returncode == 75  # It blocks the loop.
        assert not lease.lost
        assert 0 < lease.time_left < 4
        lease.check()
        await lease.release()
        assert lease.token < db.acquire("k")["token"]

    asyncio.run(work())


def test_a_job_returns_its_result_or_the_refusal(db: Database) -> None:
    @rowlock.aio.job(db.url, "job", min_interval=3600)
    async def report(lease: rowlock.aio.Lease, name: str) -> str:
        return f"{name} {lease.key}"

    run: Callable[[str], Awaitable[str | rowlock.Refusal]] = report

    async def twice() -> list[str | rowlock.Refusal]:
        return [await run("daily"), await run("daily")]

    first, second = asyncio.run(twice())
    assert first == "daily job"
    assert not second
