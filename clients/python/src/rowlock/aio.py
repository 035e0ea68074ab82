"""Leases for programs with an event loop, on PostgreSQL: a task renews each of them.

async with rowlock.aio.lock("postgres://app@db/app", "report", lease=30, wait=10) as lease:
    await write_report(fencing_token=lease.token)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
import weakref
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import psycopg
from psycopg.rows import tuple_row

from .aio_session import AsyncSession
from .confirm import confirm_statement, confirmed
from .connect import Source, default_label
from .errors import Lost, Refusal, Refused, note
from .jobs import check_work, shown_as
from .lease import drop, join_limit
from .protocol import (
    Call,
    Claim,
    Pause,
    Previous,
    State,
    Terms,
    acquiring,
    check_seconds,
    ending,
    renewing,
)

T = TypeVar("T")
P = ParamSpec("P")


async def carry_out(
    steps: Generator[Call | Pause, Any, T], on: AsyncSession, stop: asyncio.Event | None = None
) -> T:
    """Carries the steps of the protocol out. Ends them early, at a pause, if ``stop`` is set."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pause):
                if await _paused(step.seconds, stop):
                    steps.close()
                step = next(steps)
                continue
            try:
                result = await getattr(on, step.method)(*step.arguments)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


async def _paused(seconds: float, stop: asyncio.Event | None) -> bool:
    if stop is None:
        await asyncio.sleep(seconds)
        return False
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    return stop.is_set()


#: The ends that are being sent: a cancelled task does not stop them.
_ends: set[asyncio.Task[None]] = set()


class Lease:
    """A key that is held. A task renews it until it is released, abandoned or lost."""

    def __init__(
        self, source: Source, on: AsyncSession, state: State, previous: Previous | None
    ) -> None:
        self._source = source
        self._state = state
        #: The claim that this one has taken over from: its holder never ended it.
        self.taken_over_from = previous
        self._on = on
        self._stop = asyncio.Event()
        stop = functools.partial(_wake, asyncio.get_running_loop(), self._stop)
        weakref.finalize(self, drop, state, stop).atexit = False
        self._task = asyncio.create_task(_renew(state, on, self._stop))

    @property
    def claim(self) -> Claim:
        """The key, the holder and the token."""
        return self._state.claim

    @property
    def key(self) -> str:
        """The key."""
        return self.claim.key

    @property
    def token(self) -> int:
        """The fencing token: higher than that of every claim on the key before."""
        return self.claim.token

    @property
    def lost(self) -> bool:
        """Whether the claim no longer stands. It becomes true before another can be granted."""
        return self._state.lost

    @property
    def time_left(self) -> float:
        """For how many seconds the claim stands without another renewal."""
        return self._state.time_left

    def check(self) -> None:
        """Raises :class:`rowlock.Lost` if the claim no longer stands."""
        if self._state.ended or self.lost:
            raise self._state.error()

    async def confirm(self, cursor: psycopg.AsyncCursor[Any]) -> None:
        """Makes the commit of the cursor's transaction depend on the claim, as ``rowlock`` does."""
        if self._state.is_copy:
            raise self._state.error()
        sql, values = confirm_statement(cursor, self.claim)
        with confirmed(cursor, self.claim) as read:
            plain = psycopg.AsyncCursor(cursor.connection, row_factory=tuple_row)
            await plain.execute(sql, values)
            read(await plain.fetchone())

    async def release(self, status: str = "S") -> None:
        """Ends the claim after work that is complete: ``S`` for a success, ``F`` for a failure."""
        if status not in ("S", "F"):
            raise ValueError(f"status {status!r} is not valid: it has to be S or F")
        await self._end("release", status)

    async def abandon(self) -> None:
        """Ends the claim of work that has stopped: the next holder takes over at once."""
        await self._end("abandon")

    async def _end(self, change: str, *arguments: Any) -> None:
        if self._state.is_copy:
            raise self._state.error()
        if self._state.ended:
            raise Lost(self.key, self.token, "it was ended before")
        lost = self.lost
        self._state.ended = True
        end = asyncio.create_task(self._send_end(lost, change, *arguments))
        _ends.add(end)
        end.add_done_callback(_ends.discard)
        await asyncio.shield(end)

    async def _send_end(self, lost: bool, change: str, *arguments: Any) -> None:
        self._stop.set()
        limit = 0.0 if lost else join_limit(self._state, change)
        await asyncio.wait([self._task], timeout=limit)
        self._task.cancel()  # One without a reply; its connection is closed.
        await asyncio.wait([self._task])
        try:
            if lost:
                raise self._state.error()
            await carry_out(ending(self._state, change, *arguments), self._on)
        finally:
            await self._on.close()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._state.ended or self._state.is_copy:
            return  # A forked child leaves its parent's block without an effect on the claim.
        if error is None:
            await self.release("S")
            return
        try:
            # A cancelled task has not ended its work.
            await (self.release("F") if isinstance(error, Exception) else self.abandon())
        except Exception as problem:  # The block's own exception is the one to report.
            note(error, problem)


async def _renew(state: State, on: AsyncSession, stop: asyncio.Event) -> None:
    try:
        await carry_out(renewing(state), on, stop)
    finally:
        if not state.ended:  # It was lost or dropped, and there is no end to send.
            await on.close()


def _wake(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    # A lease may be dropped by another thread.
    with contextlib.suppress(RuntimeError):  # The loop is closed.
        loop.call_soon_threadsafe(stop.set)


async def try_acquire(
    source: Source, key: str, *, lease: float = 30.0, min_interval: float = 0.0,
    rules: str = "recover", label: str | None = None,
) -> Lease | Refusal:  # fmt: skip
    """Asks for a key once. Returns a lease, or a refusal, which is false."""
    terms = Terms(key, lease, min_interval, rules, default_label() if label is None else label)
    return await _acquire(source, terms, 0.0)


async def _acquire(source: Source, terms: Terms, wait: float) -> Lease | Refusal:
    on = AsyncSession(source, terms.lease)
    acquired = None
    try:
        acquired = await carry_out(acquiring(terms, str(uuid.uuid4()), wait), on)
    finally:
        if not acquired:
            await on.close()
    return acquired if isinstance(acquired, Refusal) else Lease(source, on, *acquired)


class Lock:
    """A key to be held in an ``async with`` block, and what it is asked for with.

    One that is entered while another block runs raises :class:`RuntimeError`.
    """

    def __init__(self, source: Source, terms: Terms, wait: float) -> None:
        self._source = source
        self._terms = terms
        self._wait = wait
        self._lease: Lease | None = None
        self._entered = False

    async def __aenter__(self) -> Lease:
        if self._entered:
            raise RuntimeError(
                f"this lock of key {self._terms.key!r} is entered: make one for each block"
            )
        self._entered = True
        try:
            acquired = await _acquire(self._source, self._terms, self._wait)
            if isinstance(acquired, Refusal):
                raise Refused(acquired)
        except BaseException:
            self._entered = False
            raise
        self._lease = acquired
        return acquired

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._entered = False
            await lease.__aexit__(kind, error, trace)


def lock(
    source: Source, key: str, *, lease: float = 30.0, wait: float = 0.0, min_interval: float = 0.0,
    rules: str = "recover", label: str | None = None,
) -> Lock:  # fmt: skip
    """Holds a key in an ``async with`` block."""
    terms = Terms(key, lease, min_interval, rules, default_label() if label is None else label)
    check_seconds("wait", wait)
    return Lock(source, terms, wait)


def job(
    source: Source, key: str, *, lease: float = 30.0, wait: float = 0.0, min_interval: float = 0.0,
    rules: str = "recover", label: str | None = None,
) -> Callable[
    [Callable[Concatenate[Lease, P], Awaitable[T]]], Callable[P, Awaitable[T | Refusal]]
]:  # fmt: skip
    """Runs an asynchronous function under a key. The function receives the lease first."""
    # Checked where the function is defined; the label is that of the process that runs it.
    Terms(key, lease, min_interval, rules, label)
    check_seconds("wait", wait)

    def decorate(
        work: Callable[Concatenate[Lease, P], Awaitable[T]],
    ) -> Callable[P, Awaitable[T | Refusal]]:
        check_work(work, awaits=True)

        async def run(*arguments: P.args, **named: P.kwargs) -> T | Refusal:
            known = Terms(key, lease, min_interval, rules, label or default_label())
            acquired = await _acquire(source, known, wait)
            if isinstance(acquired, Refusal):
                return acquired
            async with acquired:
                return await work(acquired, *arguments, **named)

        return shown_as(run, work)

    return decorate
