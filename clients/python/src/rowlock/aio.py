"""Locks for programs with an event loop.

    async with rowlock.aio.lock("postgres://app@db/app", "report", wait=10) as lease:
        await write_report(fencing_token=lease.token)

The threads of the library send all requests and renew the leases, as for programs with threads: a
task that blocks the loop loses no lease, and each database works. Only :meth:`Lease.confirm` uses a
cursor of the application: that of psycopg, aiomysql, asyncmy or aiosqlite.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from . import confirm
from .database import log, told
from .errors import Error, Lost, Refusal, Refused, note
from .jobs import KeyOf, check_work, shown_as
from .kinds import One
from .lease import BaseLease
from .lock import OWN, Access, Asked, BaseLock, BaseLocks, Wanted
from .result import Result
from .sources import Source
from .terms import Seconds

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
P = ParamSpec("P")


async def _awaited(result: Result[T]) -> T:
    """Waits for what goes on though its caller is cancelled."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(done.set)

    result.when_done(tell)
    await done.wait()
    return result.result()


class Lease(BaseLease):
    """A key that is held. A thread renews it until it is released, abandoned or lost."""

    async def release(self, status: str = "S") -> None:
        """Ends the claim after work that is complete, as :meth:`rowlock.Lease.release` does."""
        await _awaited(self._ending("release", status))

    async def abandon(self) -> None:
        """Ends the claim of work that has stopped: the next holder takes over at once."""
        await _awaited(self._ending("abandon"))

    async def extend(self, length: Seconds) -> None:
        """Extends the lease to this length from now, as :meth:`rowlock.Lease.extend` does."""
        await _awaited(self._extending(length))

    async def owned(self) -> bool:
        """Asks the database whether the claim stands."""
        return await _awaited(self._owning())

    async def confirm(self, cursor: Any) -> None:
        """Makes the commit of the cursor's transaction depend on the claim, as ``rowlock`` does."""
        self._confirming()
        for claim in self.claims:
            sql, values = confirm.confirm_statement(cursor, claim, self._on.kind)
            with confirm.confirming(cursor, claim):
                plain = confirm.plain_cursor(cursor)
                await plain.execute(sql, values)
                confirm.read(cursor, claim, await plain.fetchone() if plain.description else None)

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._is_over:
            return
        if error is None:
            await self.release("S")
            return
        try:
            # A cancelled task has not ended its work.
            await (self.release("F") if isinstance(error, Exception) else self.abandon())
        except Exception as problem:  # The block's own exception is the one to report.
            note(error, problem)


class Block:
    """Cancels the task of a block whose lease is lost. The block then ends with the loss."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._is_open = True
        self._loss: Lost | None = None
        #: The cancellations of the task that are not the block's.
        self._others = _cancellations(self._task)

    def on_lost(self, loss: Lost) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._cancel, loss)

    def _cancel(self, loss: Lost) -> None:
        if self._is_open and self._task is not None:
            self._loss = loss
            self._task.cancel()

    def leave(self, error: BaseException | None) -> None:
        """Raises the loss that has ended the block, unless another cancellation has."""
        self._is_open = False
        if self._loss is None:
            return
        if sys.version_info >= (3, 11) and self._task is not None:
            self._task.uncancel()
        is_own = error is None or isinstance(error, asyncio.CancelledError)
        if is_own and _cancellations(self._task) <= self._others:
            raise self._loss from error


def _cancellations(task: asyncio.Task[Any] | None) -> int:
    """Returns how many cancellations of a task are not taken back. Python 3.10 does not tell."""
    if sys.version_info >= (3, 11) and task is not None:
        return task.cancelling()
    return 0


class Lock(BaseLock):
    """A key to be held, and what it is asked for with.

    In an ``async with`` block the task is cancelled as soon as the lease is lost, and the block
    raises :class:`rowlock.Lost`. One that is entered while another block runs raises
    :class:`RuntimeError`.
    """

    def __init__(self, access: Access, wanted: Wanted) -> None:
        super().__init__(access, wanted)
        self._lease: Lease | None = None
        self._block: Block | None = None

    async def acquire(self, wait: Seconds | None = OWN) -> Lease | Refusal:
        """Waits for the key, as long as the lock does, or as ``wait`` says; ``None`` has no end.

        Returns a lease, or a refusal, which is false. A claim of a task that is cancelled is put
        back.
        """
        return await self._acquire(wait, None)

    async def _acquire(
        self, wait: Seconds | None, on_lost: Callable[[Lost], object] | None
    ) -> Lease | Refusal:
        request = self._request(wait)
        try:
            on = self._begin(request, on_lost)
            acquired = await _awaited(request.asking.result)
            if isinstance(acquired, Refusal):
                return acquired
            lease = Lease(on, acquired)
        except BaseException:
            request.asking.leave()
            raise
        request.delivered()
        return lease

    async def try_acquire(self) -> Lease | Refusal:
        """Asks once, without waiting for a holder."""
        return await self.acquire(0.0)

    async def locked(self) -> bool:
        """Asks the database whether a claim would be refused because of another claim."""
        held: bool = await _awaited(self._looking())
        return held

    async def __aenter__(self) -> Lease:
        if self._block is not None:
            raise self._entered()
        block = self._block = Block()
        own = self._wanted.on_lost

        def on_lost(error: Lost) -> None:
            block.on_lost(error)
            if own is not None:
                told(own)(error)

        try:
            acquired = await self._acquire(OWN, on_lost)
            if isinstance(acquired, Refusal):
                raise Refused(acquired)
        except BaseException as error:
            self._block = None
            block.leave(error)
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
        block, self._block = self._block, None
        if lease is None or block is None:
            return
        try:
            block.leave(error)
        except Lost as loss:  # Of several keys, those whose claims stand are freed.
            await lease.__aexit__(Lost, loss, trace)
            raise
        await lease.__aexit__(kind, error, trace)


class Locks(BaseLocks[Lock]):
    """The locks of one database, for programs with an event loop, as :class:`rowlock.Locks`."""

    def _make(self, wanted: Wanted) -> Lock:
        return Lock(self._access, wanted)

    async def leader(self, name: str, **asked: Unpack[Asked]) -> AsyncGenerator[Lease, None]:
        """Waits to be the leader, again and again, as :meth:`rowlock.Locks.leader` does."""
        asked.setdefault("wait", None)
        lock = self.lock(name, **asked)
        while True:
            acquired = await lock.acquire()
            if isinstance(acquired, Refusal):
                return
            try:
                async with acquired:
                    yield acquired
            except Error as error:
                log.warning("a term of leader %r has not ended as it should: %s", name, error)

    def job(
        self, key: str, **asked: Unpack[Asked]
    ) -> Callable[
        [Callable[Concatenate[Lease, P], Coroutine[Any, Any, T]]],
        Callable[P, Coroutine[Any, Any, T | Refusal]],
    ]:
        """Runs an asynchronous function under a key, as :meth:`rowlock.Locks.job` does.

        Its task is cancelled if the lease is lost, and the call raises :class:`rowlock.Lost`.
        """
        key_of = KeyOf(key)
        Wanted.of(key_of.example, One, asked)  # Checked where the function is defined.

        def decorate(
            work: Callable[Concatenate[Lease, P], Coroutine[Any, Any, T]],
        ) -> Callable[P, Coroutine[Any, Any, T | Refusal]]:
            check_work(work, awaits=True)
            key_of.check(work)

            async def run(*arguments: P.args, **named: P.kwargs) -> T | Refusal:
                lock = self.lock(key_of(work, arguments, named), **asked)
                try:
                    lease = await lock.__aenter__()
                except Refused as refused:
                    return refused.refusal
                try:
                    result = await work(lease, *arguments, **named)
                except BaseException as error:
                    await lock.__aexit__(type(error), error, error.__traceback__)
                    raise
                await lock.__aexit__(None, None, None)
                return result

            return shown_as(run, work)

        return decorate

    async def aclose(self) -> None:
        """Ends the sessions as soon as no lease needs them. No more keys are asked for."""
        self._access.close()

    async def __aenter__(self) -> Locks:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def connect(source: Source, *, label: str | None = None) -> Locks:
    """Returns the locks of a database, as :func:`rowlock.connect` does."""
    locks = Locks(source, label)
    locks._access.is_kept = True
    return locks


def lock(source: Source, key: str, **asked: Unpack[Asked]) -> Lock:
    """Holds a key in an ``async with`` block."""
    return Locks(source).lock(key, **asked)


async def try_acquire(source: Source, key: str, **asked: Unpack[Asked]) -> Lease | Refusal:
    """Asks for a key once. Returns a lease, or a refusal, which is false."""
    return await Locks(source).lock(key, **asked).try_acquire()


def job(
    source: Source, key: str, **asked: Unpack[Asked]
) -> Callable[
    [Callable[Concatenate[Lease, P], Coroutine[Any, Any, T]]],
    Callable[P, Coroutine[Any, Any, T | Refusal]],
]:
    """Runs an asynchronous function under a key, as :meth:`Locks.job` does."""
    return Locks(source).job(key, **asked)
