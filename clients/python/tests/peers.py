"""Runs a test with the client for threads, and then with the client for event loops."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from conftest import Database

import rowlock
import rowlock.aio


def on_both_clients(
    work: Callable[[Any, Database], Coroutine[Any, Any, None]],
) -> Callable[[Database], None]:
    """Makes a test of a coroutine function that receives ``Locks`` of either client."""

    def test(db: Database) -> None:
        for client in (rowlock, rowlock.aio):
            print("the client is", client.__name__)
            asyncio.run(on_client(client.connect(db.url, label="python"), db))

    async def on_client(locks: Any, db: Database) -> None:
        try:
            await work(locks, db)
        finally:
            await ask(getattr(locks, "aclose", None) or locks.close)

    test.__doc__ = work.__doc__
    return test


async def ask(method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a method of either client. One for threads runs on another thread each time."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await asyncio.to_thread(method, *arguments)


def begin(method: Callable[..., Any], *arguments: Any) -> asyncio.Task[Any]:
    """Calls a method beside what follows."""
    return asyncio.create_task(ask(method, *arguments))


async def granted(lock: Any, *wait: Any) -> Any:
    """Acquires, and returns the lease."""
    attempt = await ask(lock.acquire, *wait)
    assert attempt, str(attempt)
    return attempt


async def refused(lock: Any, *wait: Any) -> rowlock.Refusal:
    """Asks for what is not granted, and returns the refusal."""
    attempt = await ask(lock.acquire, *wait)
    assert isinstance(attempt, rowlock.Refusal), str(attempt)
    return attempt


@contextlib.asynccontextmanager
async def block(lock: Any) -> AsyncIterator[Any]:
    """Enters the ``with`` block of either client."""
    if isinstance(lock, rowlock.aio.Lock):
        async with lock as lease:
            yield lease
    else:
        with lock as lease:
            yield lease


async def eventually(holds: Callable[[], Any], within: float = 30.0) -> None:
    """Waits until a condition holds. A coroutine function is a condition too."""
    until = time.monotonic() + within
    while not await ask(holds):
        assert time.monotonic() < until, f"not within {within} s"
        await asyncio.sleep(0.02)


def free_by_force(db: Database, key: str) -> None:
    """Frees a key as an operator does. Its holder has lost it."""
    done = db.run("release", key, "--force")
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def row_locked(db: Database, key: str) -> Iterator[None]:
    """Keeps the row of a key locked, so that no renewal succeeds."""
    lock = f"SELECT 1 FROM t_resource_lock WHERE key_resource = '{key}' FOR UPDATE"
    if db.name == "sqlite":
        lock = f"UPDATE t_resource_lock SET status = status WHERE key_resource = '{key}'"
    connection = db.connect()
    connection.cursor().execute(lock)
    try:
        yield
    finally:
        connection.rollback()
        connection.close()


async def cancel_at_random_moments(acquire: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Cancels 30 acquisitions, most of them in flight. What was granted before is released."""
    cancelled = 0
    for number in range(30):
        task = asyncio.create_task(acquire())
        await asyncio.sleep(0.01 * random.random() ** 2 if number else 0)
        task.cancel()
        try:
            attempt = await task
        except asyncio.CancelledError:
            cancelled += 1
        else:
            await attempt.release()
    assert cancelled
