"""What would let two programs hold a key, or let work run without it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest
from conftest import POSTGRES, SQLITE, Database, acquired, eventually, refused
from fakes import Fake, hold, is_renewed, state
from test_processes import WORKER

import rowlock
import rowlock.aio
from rowlock.errors import note


def in_child(work: Any) -> int:
    """Runs work in a forked child, and returns its exit code: 0 if the work returned."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def loses(lease: Any, *calls: Any) -> None:
    """Asserts that a forked child is told that the claim is not its own."""
    assert lease.lost
    assert lease.time_left == 0
    for call in calls:
        with pytest.raises(rowlock.Lost, match="is a fork"):
            call()


@pytest.mark.parametrize("kind", [None, SystemExit, ValueError])
def test_a_forked_child_does_not_end_its_parents_claim(db: Database, kind: Any) -> None:
    with rowlock.lock(db.url, "k", lease=6) as lease:

        def work() -> None:
            loses(lease, lease.check, lease.release, lease.abandon, lambda: lease.confirm(None))
            lease.__exit__(kind, kind() if kind else None, None)

        assert in_child(work) == 0
        assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"
        if kind is SystemExit:  # Its parent's connection is whole: the lease is renewed.
            time.sleep(7)
        assert not lease.lost
        assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"
    assert db.show("k")["status"] == "S"


def test_a_forked_child_does_not_end_the_claim_of_a_task(db: Database) -> None:
    async def run() -> None:
        async with rowlock.aio.lock(db.url, "k") as lease:

            def at_once(steps: Any) -> None:
                with pytest.raises(StopIteration):
                    steps.send(None)

            def work() -> None:
                loses(
                    lease,
                    lease.check,
                    lambda: lease.release().send(None),
                    lambda: lease.abandon().send(None),
                    lambda: lease.confirm(None).send(None),
                )
                at_once(lease.__aexit__(SystemExit, SystemExit(), None))

            assert in_child(work) == 0
            assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"

    asyncio.run(run())
    assert db.show("k")["status"] == "S"


@POSTGRES
def test_a_lock_that_a_thread_has_entered_may_be_entered_in_a_fork(db: Database) -> None:
    lock = rowlock.lock(db.url, "k")
    entered, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(60)

    def work() -> None:
        with pytest.raises(rowlock.Refused):
            lock.__enter__()

    assert in_child(work) == 0
    done.set()
    thread.join()


def test_work_that_would_run_after_the_release_is_refused() -> None:
    async def coroutine(lease: Any) -> None: ...

    def generator(lease: Any) -> Generator[None, None, None]:
        yield

    async def generates(lease: Any) -> AsyncGenerator[None, None]:
        yield

    def plain(lease: Any) -> None: ...

    class Callable:
        async def __call__(self, lease: Any) -> None: ...

    for work in (coroutine, generator, generates, Callable()):
        with pytest.raises(TypeError, match="after the release"):
            rowlock.job("sqlite:/nowhere", "k")(work)
    for work in (generator, generates):
        with pytest.raises(TypeError, match="after the release"):
            rowlock.aio.job("postgres:///nowhere", "k")(work)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"use rowlock\.job"):
        rowlock.aio.job("postgres:///nowhere", "k")(plain)  # type: ignore[arg-type]


def test_a_method_is_no_job_and_the_lease_is_not_in_the_signature() -> None:
    with pytest.raises(TypeError, match="is a method"):

        class Reports:
            @rowlock.job("sqlite:/nowhere", "k")  # type: ignore[arg-type]
            def write(self, lease: rowlock.Lease) -> None: ...  # type: ignore[misc]

    def work(lease: rowlock.Lease, name: str, *, loud: bool = False) -> str:
        return name

    async def awaited(lease: rowlock.aio.Lease, name: str, *, loud: bool = False) -> str:
        return name

    for job in (
        rowlock.job("sqlite:/nowhere", "k")(work),
        rowlock.aio.job("postgres:///nowhere", "k")(awaited),
    ):
        assert list(inspect.signature(job).parameters) == ["name", "loud"]
        assert "lease" not in job.__annotations__


@SQLITE
def test_an_object_is_entered_by_one_thread_at_a_time(db: Database) -> None:
    lock = rowlock.lock(db.url, "k", lease=2)
    raised: list[BaseException] = []

    def enter() -> None:
        try:
            with lock:
                pass
        except RuntimeError as error:
            raised.append(error)

    with lock as lease:
        other = threading.Thread(target=enter)
        other.start()
        other.join()
        assert "is entered" in str(raised[0])
        assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"
    assert db.show("k")["token"] == lease.token
    with pytest.raises(rowlock.Refused), rowlock.lock(db.url, "k"), rowlock.lock(db.url, "k"):
        pass
    with lock, pytest.raises(RuntimeError), lock:
        pass
    with lock:  # One that has ended, and one that was refused, is entered again.
        pass


def test_an_object_is_entered_by_one_task_at_a_time(db: Database) -> None:
    async def run() -> None:
        lock = rowlock.aio.lock(db.url, "k")
        async with lock:
            with pytest.raises(RuntimeError, match="is entered"):
                await lock.__aenter__()
            assert not await rowlock.aio.try_acquire(db.url, "k")
        async with lock:
            pass

    asyncio.run(run())


@SQLITE
def test_a_lease_that_is_dropped_is_told_and_its_key_not_freed(db: Database) -> None:
    lease = acquired(rowlock.try_acquire(db.url, "k", lease=2))
    on = lease._on
    eventually(lambda: on.renewals._tasks)
    with pytest.warns(ResourceWarning, match="'k' was dropped"):  # noqa: PT031
        del lease
        gc.collect()
    eventually(lambda: not on.renewals._tasks)
    # The work may go on, as in `if rowlock.try_acquire(...): work()`.
    assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"
    with rowlock.lock(db.url, "k", wait=20) as taken:
        assert taken.taken_over_from is not None


def test_a_lease_of_a_task_that_is_dropped_is_renewed_no_more(db: Database) -> None:
    async def run() -> None:
        lease = await rowlock.aio.try_acquire(db.url, "k", lease=2)
        assert isinstance(lease, rowlock.aio.Lease)
        on = lease._on
        eventually(lambda: on.renewals._tasks)
        with pytest.warns(ResourceWarning, match="'k' was dropped"):  # noqa: PT031
            del lease
            gc.collect()
        eventually(lambda: not on.renewals._tasks)
        async with rowlock.aio.lock(db.url, "k", wait=20) as taken:
            assert taken.taken_over_from is not None

    asyncio.run(run())


@SQLITE
@pytest.mark.filterwarnings("ignore:the lease of key")
def test_an_interrupt_while_a_block_begins_leaves_no_key_and_one_thread(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads that carry out the same tasks, each would spoil the work of the other."""
    others = threading.enumerate()
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt), rowlock.lock(db.url, "k", lease=2):
            pytest.fail("the block has begun")
    gc.collect()
    assert len(started) == 1
    with rowlock.lock(db.url, "k", wait=20):
        names = [thread.name for thread in threading.enumerate() if thread not in others]
        assert names.count("rowlock requests") == 1
        assert names.count("rowlock renewals") == 1


@SQLITE
def test_an_interrupt_before_a_variable_has_the_lease_leaves_no_renewals(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be renewed for as long as the process runs."""

    class Interrupted(rowlock.Lease):
        def __init__(self, *arguments: Any) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["rowlock.lock"], "Lease", Interrupted)
        with pytest.raises(KeyboardInterrupt), rowlock.lock(db.url, "k", lease=2):
            pytest.fail("the block has begun")
    gc.collect()
    with rowlock.lock(db.url, "k", wait=20):
        pass


@SQLITE
@pytest.mark.parametrize("before", [0.0, 0.3])
def test_an_interrupt_while_a_key_is_waited_for_leaves_no_key(db: Database, before: float) -> None:
    """A claim that is granted to a caller that has gone is put back."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    held = acquired(rowlock.try_acquire(db.url, "k"))
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt), rowlock.lock(db.url, "k", wait=60):
            pytest.fail("the block has begun")
    finally:
        signal.signal(signal.SIGALRM, handler)
    time.sleep(before)
    held.release()
    eventually(lambda: not held._on.renewals._tasks and not held._on.requests._tasks)
    with rowlock.lock(db.url, "k", min_interval=0.001) as lease:
        assert lease.taken_over_from is None


@POSTGRES
def test_interrupts_at_any_time_leave_no_thread(db: Database) -> None:
    """Ctrl-C during a claim, a block's begin, and a release, in a process of its own.

    Threads that are left would renew a lease that no variable has.
    """
    done = subprocess.run(
        [sys.executable, WORKER, "interrupt", db.url, "k", "1", "150"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    interrupts, threads = map(int, done.stdout.split())
    assert interrupts > 20
    assert threads == 0
    with rowlock.lock(db.url, "k", wait=20):
        pass


def test_an_interrupt_while_a_thread_is_told_to_stop_blocks_nothing() -> None:
    """The lease is dropped after the interrupt, and its finalizer tells the thread again."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupts = 0
    gc.collect()
    gc.disable()  # An interrupt in the finalizer of an object of another test is ignored.
    try:
        for _ in range(100):
            lease = hold(Fake(lambda *_: "done"), state(600.0))
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001)
                for _ in range(100_000):
                    lease._state.drop()
            except KeyboardInterrupt:
                interrupts += 1
            again = threading.Thread(target=lease._state.drop, daemon=True)
            again.start()
            again.join(30)
            assert not again.is_alive(), "the interrupt has left a lock taken"
            eventually(lambda on=lease._on: not is_renewed(on))
            lease._state.end()
        assert interrupts > 50
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)


@SQLITE
def test_a_lease_that_has_ended_is_dropped_without_a_warning(
    db: Database, recwarn: pytest.WarningsRecorder
) -> None:
    with rowlock.lock(db.url, "k"):
        pass
    gc.collect()
    assert [one for one in recwarn if "rowlock" in str(one.message)] == []


def test_a_failed_end_is_told_where_exceptions_have_no_notes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = ValueError("the work failed")
    if sys.version_info >= (3, 11):
        note(error, rowlock.Unknown("the release has no reply"))
        assert error.__notes__ == ["rowlock: the release has no reply"]
    with monkeypatch.context() as older:
        older.setattr(sys, "version_info", (3, 10))
        note(error, rowlock.Unknown("the release has no reply"))
    assert "the release has no reply" in caplog.text
