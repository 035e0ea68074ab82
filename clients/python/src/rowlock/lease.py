"""Leases for programs without an event loop: a thread renews each of them."""

from __future__ import annotations

import queue
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from . import clock
from .confirm import confirm_statement, confirmed
from .connect import Session, Source, default_label, plain_cursor, session
from .errors import Lost, Refusal, Refused, note
from .jobs import check_work, shown_as
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
    patience,
    renewing,
)

T = TypeVar("T")
P = ParamSpec("P")


def carry_out(
    steps: Generator[Call | Pause, Any, T], on: Session, pause: Callable[[float], Any] = time.sleep
) -> T:
    """Carries the steps of the protocol out. Ends them early if ``pause`` returns true."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pause):
                if pause(step.seconds):
                    steps.close()
                step = next(steps)
                continue
            try:
                result = getattr(on, step.method)(*step.arguments)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


class Stop:
    """Tells a thread to stop. An interrupt or a finalizer cannot leave it half told.

    ``threading.Event`` has a lock, which an interrupt in ``set`` may leave taken: the next ``set``,
    by the finalizer of the lease, would then wait for ever. ``put`` takes none.
    """

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._told.put(None)

    def wait(self, seconds: float) -> bool:
        """Waits until the thread is told to stop, at most so long. Returns whether it is told."""
        try:
            self._told.get(timeout=seconds)
        except queue.Empty:
            return False
        self._told.put(None)
        return True


class Lease:
    """A key that is held. A thread renews it until it is released, abandoned or lost.

    As a context manager it is released at the end: with S, or with F after an exception. If the
    block ends with ``KeyboardInterrupt`` or ``SystemExit``, it is abandoned: the work did not end.
    """

    def __init__(
        self, source: Source, on: Session, state: State, previous: Previous | None
    ) -> None:
        self._source = source
        self._on = on
        self._state = state
        self._stop = Stop()
        self._late = threading.Event()
        #: The claim that this one has taken over from: its holder never ended it.
        self.taken_over_from = previous
        self._thread = threading.Thread(
            target=_renew,
            args=(state, on, self._stop, self._late),
            name=f"rowlock {state.claim.key}",
            daemon=True,
        )
        # An interrupt may come while the thread starts, when no variable has the lease yet.
        weakref.finalize(self, drop, state, self._stop.set).atexit = False
        try:
            self._thread.start()
        except RuntimeError:  # There are too many threads: a lease that none renews is not held.
            state.ended = True
            try:
                carry_out(ending(state, "abandon"), on)
            finally:
                on.close()
            raise

    @property
    def claim(self) -> Claim:
        """The key, the holder and the token. Another process takes the claim up with them."""
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
        """Raises :class:`Lost` if the claim no longer stands."""
        if self._state.ended or self.lost:
            raise self._state.error()

    def confirm(self, cursor: Any) -> None:
        """Makes the commit of the cursor's transaction depend on the claim.

        It is called first in the transaction. The row stays locked until the transaction ends.
        Raises :class:`Lost` if the claim does not stand: the caller then rolls back.
        """
        if self._state.is_copy:
            raise self._state.error()
        sql, values = confirm_statement(cursor, self.claim)
        with confirmed(cursor, self.claim) as read:
            plain = plain_cursor(cursor)
            plain.execute(sql, values)
            read(plain.fetchone() if plain.description else None)

    def release(self, status: str = "S") -> None:
        """Ends the claim after work that is complete: ``S`` for a success, ``F`` for a failure.

        Raises :class:`Lost` if the claim did not stand, :class:`Unknown` if there is no reply, and
        :class:`Unavailable` if another transaction has locked its row for five seconds.
        """
        if status not in ("S", "F"):
            raise ValueError(f"status {status!r} is not valid: it has to be S or F")
        self._end("release", status)

    def abandon(self) -> None:
        """Ends the claim of work that has stopped: the next holder takes over at once."""
        self._end("abandon")

    def _end(self, change: str, *arguments: Any) -> None:
        if self._state.is_copy:
            raise self._state.error()
        if self._state.ended:
            raise Lost(self.key, self.token, "it was ended before")
        lost = self.lost
        self._state.ended = True
        self._stop.set()
        self._thread.join(0.0 if lost else join_limit(self._state, change))
        # A renewal without a reply keeps its connection; the end is sent on another.
        on = self._on
        if self._thread.is_alive():
            self._late.set()
            on = session(self._source, self._state.lease)
        try:
            if lost:
                raise self._state.error()
            carry_out(ending(self._state, change, *arguments), on)
        finally:
            on.close()
            if not self._thread.is_alive():
                self._on.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._state.ended or self._state.is_copy:
            return  # A forked child leaves its parent's block without an effect on the claim.
        if error is None:
            self.release("S")
            return
        try:
            if isinstance(error, Exception):
                self.release("F")
            else:
                self.abandon()
        except Exception as problem:  # The block's own exception is the one to report.
            note(error, problem)

    def __repr__(self) -> str:
        return f"<Lease of {self.key!r} under token {self.token}>"


def _renew(state: State, on: Session, stop: Stop, late: threading.Event) -> None:
    try:
        carry_out(renewing(state), on, stop.wait)
    finally:
        # It was lost or dropped, or its end is sent on another connection.
        if not state.ended or late.is_set():
            on.close()


def join_limit(state: State, change: str) -> float:
    """For how many seconds an end waits for a renewal in flight.

    A renewal that the database carries out after an abandon would undo it. After a release it
    changes nothing.
    """
    limit = patience(state.lease) + 0.5 if change == "abandon" else min(state.lease / 12, 1.0)
    return max(0.0, min(limit, state.deadline - clock.now()))


def drop(state: State, stop: Callable[[], object]) -> None:
    """Ends the renewals of a lease that was dropped. Its work may go on: the key is not freed."""
    if state.is_copy:
        return
    unended = not state.ended and state.why_lost is None
    stop()
    if unended:
        warnings.warn(
            f"the lease of key {state.claim.key!r} was dropped and is renewed no more: "
            "keep it until its work ends, and release it",
            ResourceWarning,
            stacklevel=2,
        )


def try_acquire(
    source: Source, key: str, *, lease: float = 30.0, min_interval: float = 0.0,
    rules: str = "recover", label: str | None = None,
) -> Lease | Refusal:  # fmt: skip
    """Asks for a key once. Returns a lease, or a refusal, which is false.

    ``source`` is a URL, a connection, whose place alone is read, or a function that connects.
    Durations are in seconds.
    """
    terms = Terms(key, lease, min_interval, rules, default_label() if label is None else label)
    return _acquire(source, terms, 0.0)


def _acquire(source: Source, terms: Terms, wait: float) -> Lease | Refusal:
    on = session(source, terms.lease)
    acquired = None
    try:
        acquired = carry_out(acquiring(terms, str(uuid.uuid4()), wait), on)
    finally:
        if not acquired:
            on.close()
    return acquired if isinstance(acquired, Refusal) else Lease(source, on, *acquired)


class Lock:
    """A key to be held in a ``with`` block, and what it is asked for with.

    The blocks of an object follow each other. One that is entered while another runs raises
    :class:`RuntimeError`: each thread makes a lock of its own.
    """

    def __init__(self, source: Source, terms: Terms, wait: float) -> None:
        self._source = source
        self._terms = terms
        self._wait = wait
        self._lease: Lease | None = None
        self._entered = threading.Lock()

    def __enter__(self) -> Lease:
        if not self._entered.acquire(blocking=False):
            raise RuntimeError(
                f"this lock of key {self._terms.key!r} is entered: make one for each block"
            )
        try:
            acquired = _acquire(self._source, self._terms, self._wait)
            if isinstance(acquired, Refusal):
                raise Refused(acquired)
        except BaseException:
            self._entered.release()
            raise
        self._lease = acquired
        return acquired

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._entered.release()
            lease.__exit__(kind, error, trace)


def lock(
    source: Source, key: str, *, lease: float = 30.0, wait: float = 0.0, min_interval: float = 0.0,
    rules: str = "recover", label: str | None = None,
) -> Lock:  # fmt: skip
    """Holds a key in a ``with`` block. Raises :class:`Refused` if it is not free in time."""
    terms = Terms(key, lease, min_interval, rules, default_label() if label is None else label)
    check_seconds("wait", wait)
    return Lock(source, terms, wait)


def job(
    source: Source, key: str, *, lease: float = 30.0, wait: float = 0.0, min_interval: float = 0.0,
    rules: str = "recover", label: str | None = None,
) -> Callable[[Callable[Concatenate[Lease, P], T]], Callable[P, T | Refusal]]:  # fmt: skip
    """Runs a function under a key. The function receives the lease first.

    A call returns what the function returns, or the refusal, which a scheduler may ignore.
    Coroutine functions, generators and methods raise :class:`TypeError`.
    """
    # Checked where the function is defined; the label is that of the process that runs it.
    Terms(key, lease, min_interval, rules, label)
    check_seconds("wait", wait)

    def decorate(work: Callable[Concatenate[Lease, P], T]) -> Callable[P, T | Refusal]:
        check_work(work, awaits=False)

        def run(*arguments: P.args, **named: P.kwargs) -> T | Refusal:
            known = Terms(key, lease, min_interval, rules, label or default_label())
            acquired = _acquire(source, known, wait)
            if isinstance(acquired, Refusal):
                return acquired
            with acquired:
                return work(acquired, *arguments, **named)

        return shown_as(run, work)

    return decorate
