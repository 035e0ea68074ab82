"""What all locks of a process on one database share: two sessions, and what renews its leases."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from . import clock
from .errors import Lost, Refusal, Unavailable
from .kinds import Kind
from .listener import Listener
from .loop import Loop, Task
from .protocol import Acquired, Claim, State, Steps, Wait, patience
from .result import Result
from .sources import Place
from .steps import ending, extending, renewing, watching

#: For how many seconds a session is kept without a request.
LINGER = 30.0
#: For how many seconds the end of the process waits for claims that are being ended.
EXIT = 5.0
#: Runs the handlers of the log, which belong to the application.
_EVENTS = Loop("rowlock events")
#: Watches the deadlines. Nothing of the application runs here if threads can be started.
_WATCH = Loop("rowlock watch")

log = logging.getLogger("rowlock")
T = TypeVar("T")


class Asking:
    """What is known of a claim that is being made."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait
        self.result: Result[Acquired | Refusal] = Result()
        self.state: State | None = None
        #: Wakes what asks for the claim.
        self.wake: Callable[[], object] = lambda: None

    def leave(self) -> None:
        """Ends the wait. A claim that is granted to no caller is put back.

        A finalizer may call it, in any thread: it takes no mutex.
        """
        self.wait.leave()
        self.wake()
        if self.state is not None:
            self.state.drop()


class Request:
    """The caller's part of a claim. If it is dropped before a lease has it, the claim is put back.

    An interrupt may come at any time: the request exists before the claim is asked for.
    """

    def __init__(self, wait: Wait) -> None:
        self.asking = Asking(wait)
        self._finalizer = weakref.finalize(self, self.asking.leave)
        self._finalizer.atexit = False

    def delivered(self) -> None:
        """A lease has the claim."""
        if self.asking.state is not None:
            self.asking.state.delivered = True
        self._finalizer.detach()


class Database:
    """The loops of one database in this process. They end when nothing needs them."""

    def __init__(self, place: Place) -> None:
        self._place = place
        linger = LINGER if place.is_shared else 0.0
        self._listener = Listener(place.listen, self._notified)
        self.requests = Loop("rowlock requests", self._session, linger)
        self.renewals = Loop("rowlock renewals", place.session, linger)
        self.process = os.getpid()
        #: What database it is, or none if only a connection tells.
        self.kind = place.kind
        #: What the end of the process waits for: claims that are asked for and whose callers have
        #: gone, leases that were dropped before a caller had them, and ends.
        self._asked: set[Asking] = set()
        self._held: dict[int, State] = {}
        self._ends: set[object] = set()

    def _session(self) -> Any:
        session = self._place.session()
        session.listener = self._listener
        return session

    def _notified(self, key: str) -> None:
        self.requests.released([key])

    def acquire(
        self,
        kind: Kind,
        request: Request,
        on_lost: Callable[[Lost], object] | None = None,
    ) -> None:
        """Begins to acquire."""
        asking = request.asking
        asking.wait.tell = functools.partial(_tell_request, kind.terms.key)
        steps = kind.acquiring(asking.wait, self._place.polls, self._hold)
        done = functools.partial(self._acquired, asking, on_lost)
        task = Task(steps, patience(kind.terms.lease), done)
        asking.wake = functools.partial(self.requests.wake, task)
        self._asked.add(asking)
        self.requests.closes = self.renewals.closes = False  # What is closed asks for no key.
        try:
            self.requests.run(task)
        except RuntimeError:
            self._asked.discard(asking)
            raise

    def _acquired(
        self,
        asking: Asking,
        on_lost: Callable[[Lost], object] | None,
        result: Any,
        error: BaseException | None,
    ) -> None:
        if error is None and isinstance(result, Acquired):
            asking.state = result.state
            try:
                self._hold(result.state)
                if on_lost is not None:
                    self._watch(result.state, on_lost)
            except RuntimeError as problem:  # No thread can be started: no lease is held.
                self._held.pop(id(result.state), None)
                self.put_back(result)
                error = problem
            else:
                if asking.wait.is_left:
                    self.put_back(result)
        self._asked.discard(asking)
        asking.result.deliver(result, error)

    def _hold(self, state: State) -> None:
        """Begins to renew a lease, once."""
        if state.wakes:
            return
        tell_failure = functools.partial(_tell_failure, state.claim)
        steps = renewing(state, tell_failure)
        task = Task(steps, patience(state.lease), lambda *_: self._over(state))
        state.wakes.append(functools.partial(self.renewals.wake, task))
        self._held[id(state)] = state
        self.renewals.run(task)

    def _watch(self, state: State, on_lost: Callable[[Lost], object]) -> None:
        """Tells of a loss, where a callback that blocks holds up nothing."""
        task = Task(watching(state, on_lost), 0.0)
        state.wakes.append(functools.partial(_WATCH.wake, task))
        _WATCH.run(task)

    def _over(self, state: State) -> None:
        """Tells of a loss."""
        self._held.pop(id(state), None)
        key, why = state.claim.key, state.why_lost
        if why is not None:
            _warn("the claim on key %r is lost: %s", key, why)
        elif state.dropped and state.delivered and not state.ended:
            _warn("the lease of key %r was dropped: it is not renewed", key)

    def put_back(self, result: Acquired | Refusal) -> None:
        """Ends a claim whose caller has gone, as if it had never been made."""
        if isinstance(result, Acquired) and result.state.end():
            self._run_end(result.state, "put back", None)

    def end(self, state: State, change: str, value: Any = None) -> Result[None]:
        """Ends a lease. That goes on though its caller goes away, or hears of a failure."""
        lost = state.lost
        if not state.end():
            raise Lost(state.claim.key, state.claim.token, "it was ended before")
        if lost:
            # The work has ended: of several keys, those whose claims stand are free.
            if len(state.claims) > 1:
                with contextlib.suppress(Unavailable):
                    self._run_end(state, "abandon", None)
            raise state.error()
        return self._run_end(state, change, value)

    def _run_end(self, state: State, change: str, value: Any) -> Result[None]:
        result: Result[None] = Result()
        # An error that was raised has the variables of its caller, such as a connection whose
        # transaction is in the way. It is not kept while the end goes on.
        untold, end = [result], object()

        def tell(error: BaseException | None) -> None:
            if untold:
                untold.pop().deliver(None, error)
            elif isinstance(error, Lost):
                _warn("an end of the claim on key %r came too late: %s", state.claim.key, error)

        def done(_: None, error: BaseException | None) -> None:
            self.requests.released([claim.key for claim in state.claims])
            self._ends.discard(end)
            tell(error)

        self._ends.add(end)
        try:
            run_on_one(
                (self.requests, self.renewals),
                lambda: Task(ending(state, change, value, tell), patience(state.lease), done),
            )
        except RuntimeError as error:  # As at the end of the process.
            self._ends.discard(end)
            key = state.claim.key
            raise Unavailable(f"the claim on key {key!r} ends with its lease: {error}") from error
        return result

    def settle(self, until: float) -> None:
        """Waits until what was left or is being ended is settled, as far as there is time."""
        while clock.now() < until and (
            self._ends
            or any(asking.wait.is_left for asking in tuple(self._asked))
            or any(one.dropped and not one.delivered for one in tuple(self._held.values()))
        ):
            time.sleep(0.005)

    def ask(self, steps: Steps[Any], lease: float) -> Result[Any]:
        """Carries out steps that change nothing."""
        result: Result[Any] = Result()
        self.requests.run(Task(steps, patience(lease), result.deliver))
        return result

    def extend(self, state: State, length: float) -> Result[Any]:
        """Extends a lease to so many seconds from now."""
        return self.ask(extending(state, length), state.lease)

    def is_own_thread(self) -> bool:
        """Returns whether the caller runs on a thread that carries requests out."""
        return self.requests.is_current() or self.renewals.is_current()

    def keep(self) -> None:
        """Keeps the sessions for the next call."""
        self.requests.linger = self.renewals.linger = LINGER

    def close(self) -> None:
        """Ends the sessions as soon as no lease needs them."""
        self.requests.close_soon()
        self.renewals.close_soon()
        self._listener.close()


def run_on_one(loops: Sequence[Loop], task: Callable[[], Task]) -> None:
    """Begins a task on the first loop that has a thread, or can start one.

    Python 3.12 starts none at the end of the process.
    """
    for loop in loops[:-1]:
        try:
            loop.run(task())
        except RuntimeError:
            continue
        return
    loops[-1].run(task())


def result_of(on: Database, result: Result[T]) -> T:
    """Waits for a result, unless the caller runs on a thread that has to carry it out.

    A finalizer may run on any thread, and at the end of the process there is no such thread.
    """
    if on.is_own_thread() or sys.is_finalizing():
        raise RuntimeError("a lock is used by a finalizer, on a thread that cannot wait for it")
    return result.result()


def ended_of(on: Database, result: Result[None]) -> None:
    """Waits for an end. Where the caller cannot wait, the end goes on without it."""
    if not (on.is_own_thread() or sys.is_finalizing()):
        result.result()


def told(callback: Callable[[Lost], object]) -> Callable[[Lost], object]:
    """Returns a callback that runs on a thread of its own, or here if none can be started."""

    def call(error: Lost) -> None:
        try:
            callback(error)
        except BaseException:
            log.exception("on_lost failed")

    def start(error: Lost) -> None:
        try:
            threading.Thread(target=call, args=(error,), name="rowlock loss", daemon=True).start()
        except RuntimeError:
            call(error)

    return start


def wait_of(seconds: float | None) -> Wait:
    """Returns a wait that ends so many seconds from now, or has no end."""
    return Wait(float("inf") if seconds is None else clock.now() + seconds)


def _tell_request(key: str, failure: str | None) -> None:
    if failure is None:
        _warn("key %r is asked for again", key)
    else:
        _warn("key %r cannot be asked for, which is tried again: %s", key, failure)


def _tell_failure(claim: Claim, failure: str | None) -> None:
    if failure is None:
        _warn("key %r is renewed again", claim.key)
    else:
        _warn("key %r is not renewed, and tried again: %s", claim.key, failure)


def _warn(text: str, *values: object) -> None:
    """Logs where a handler holds up no request and no renewal. Without a thread it is left out."""

    def steps() -> Steps[None]:
        log.warning(text, *values)
        return
        yield

    with contextlib.suppress(RuntimeError):
        _EVENTS.run(Task(steps(), 0.0))


_known: weakref.WeakValueDictionary[Hashable, Database] = weakref.WeakValueDictionary()
_mutex = threading.RLock()
#: What belongs to the process that this one was forked from. Nothing of it is closed here.
_inherited: list[Any] = []


def of(place: Place) -> Database:
    """Returns what the locks of this process on a database share."""
    with _mutex:
        database = _known.get(place.key)
        if database is None:
            database = _known[place.key] = Database(place)
        return database


def _forked() -> None:
    global _known, _mutex, _EVENTS, _WATCH
    _inherited.append((list(_known.values()), _EVENTS, _WATCH))
    _known, _mutex = weakref.WeakValueDictionary(), threading.RLock()
    _EVENTS, _WATCH = Loop("rowlock events"), Loop("rowlock watch")


def _settle() -> None:
    """Gives claims that an interrupt has left, and ends in flight, time before the process ends."""
    if not _known:
        return
    gc.collect()  # What was dropped is ended now.
    until = clock.now() + EXIT
    for database in list(_known.values()):
        database.settle(until)


atexit.register(_settle)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
