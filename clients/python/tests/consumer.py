"""A program that uses the client, for mypy and pyright in their strict modes. It is not run."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from typing_extensions import assert_type

import rowlock
import rowlock.aio

URL = "postgres://app@db/app"
locks = rowlock.connect(URL, label="reports")


def ask() -> str:
    got = locks.lock("report", lease=timedelta(seconds=30), wait=10).acquire()
    assert_type(got, rowlock.Lease | rowlock.Refusal)
    if got:
        assert_type(got, rowlock.Lease)
        got.release()
        return f"done under {got.token}"
    assert_type(got, rowlock.Refusal)
    return got.reason


def ask_once() -> str | None:
    got = rowlock.try_acquire(URL, "report", rules="article", min_interval=1800)
    if not got:
        return got.reason
    with got as lease:
        assert_type(lease, rowlock.Lease)
    return None


def hold() -> None:
    with locks.lock("report", wait=None, on_lost=lambda lost: print(lost.token)) as lease:
        lease.check()
        lease.extend(timedelta(minutes=5))
        assert_type(lease.owned(), bool)
    with locks.lock_all(["a", "b"]) as lease, locks.semaphore("pool", 3):
        assert_type(lease.claims, tuple[rowlock.Claim, ...])
    files = locks.read_write("files")
    assert_type(files, rowlock.ReadWrite[rowlock.Lock])
    with files.read() as reader:
        assert_type(reader.writer_token, int | None)
    for term in locks.leader("scheduler"):
        assert_type(term, rowlock.Lease)


def sources(connection: psycopg.Connection[Any], file: sqlite3.Connection) -> list[rowlock.Locks]:
    def connected() -> psycopg.Connection[Any]:
        return connection

    sources: list[rowlock.Source] = [URL, Path("locks.db"), connection, file, connected]
    return [rowlock.connect(source) for source in sources]


@locks.job("report-{day}", wait=5)
def report(lease: rowlock.Lease, day: str, *, draft: bool = False) -> int:
    return len(day) if draft else lease.token


def scheduled() -> int:
    result = report("2026-11-27", draft=True)
    assert_type(result, int | rowlock.Refusal)
    return 0 if isinstance(result, rowlock.Refusal) else result


async def ask_in_a_task() -> None:
    tasks = rowlock.aio.connect(URL)
    async with tasks.lock("report") as lease:
        assert_type(lease, rowlock.aio.Lease)
        await lease.extend(60)
    got = await tasks.semaphore("pool", 3).try_acquire()
    if got:
        await got.release()
    else:
        assert_type(got, rowlock.Refusal)
    async for term in tasks.leader("scheduler"):
        assert_type(await term.owned(), bool)


@rowlock.aio.job(URL, "report-{day}")
async def report_in_a_task(lease: rowlock.aio.Lease, day: str) -> int:
    return len(day)


def begin_in_a_task(lease: rowlock.aio.Lease) -> Awaitable[int | rowlock.Refusal]:
    return report_in_a_task("2026-11-27")


# What is no coroutine function is refused when it is decorated.
begun = rowlock.aio.job(URL, "report")(begin_in_a_task)  # type: ignore[arg-type]


async def scheduled_in_a_task() -> None:
    assert_type(await report_in_a_task("2026-11-27"), int | rowlock.Refusal)
