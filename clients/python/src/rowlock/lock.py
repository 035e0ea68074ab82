"""Locks: what is asked for, and how long it is waited for."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypedDict, TypeVar

from . import database
from .database import Database, Request, log, result_of
from .errors import Error, Lost, Refusal, Refused
from .jobs import KeyOf, check_work, shown_as
from .kinds import All, Kind, One, Permit, Reader, Writer
from .lease import Lease
from .sources import Place, Source, place_of
from .terms import Rules, Seconds, Terms, default_label, seconds, seconds_or_none

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
P = ParamSpec("P")
#: A lock for threads, or one for event loops.
L = TypeVar("L", bound="BaseLock")
#: Stands for the lock's own wait.
OWN: Any = object()


class Asked(TypedDict, total=False):
    """How a key is asked for. Durations are in seconds, or ``timedelta``."""

    #: For how long the claim stands without a renewal: 30 s if it is not given.
    lease: Seconds
    #: For how long a key is waited for: not at all if it is not given, without an end if it is
    #: ``None``.
    wait: Seconds | None
    #: For how long a key is refused after the last claim has begun.
    min_interval: Seconds
    #: ``recover``: a lease that has ended is taken over. ``article``: an operator has to free it.
    rules: Rules
    #: Those that wait and are fair are granted the key in order, across processes and languages.
    fair: bool
    #: What others see of the holder: the host and the process if it is not given.
    label: str | None
    #: Is called with the error if the claim is lost, on a thread of its own.
    on_lost: Callable[[Lost], object] | None


class Access:
    """What a process shares on a database, which is found when it is first needed."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._place: Place | None = None
        self._database: Database | None = None
        #: Sessions are kept for the next call.
        self.is_kept = False
        self.is_closed = False

    def database(self) -> Database:
        if self.is_closed:
            raise RuntimeError("these locks are closed")
        if self._place is None:
            self._place = place_of(self._source)
        if self._database is None or self._database.process != os.getpid():
            self._database = database.of(self._place)
            if self.is_kept:
                self._database.keep()
        return self._database

    def close(self) -> None:
        self.is_closed = True
        if self._database is not None and self._database.process == os.getpid():
            self._database.close()


@dataclass(frozen=True)
class Wanted:
    """What a lock asks for, but for the label of the process that asks."""

    terms: Terms
    kind: Callable[[Terms], Kind]
    wait: float | None
    label: str | None
    on_lost: Callable[[Lost], object] | None

    @classmethod
    def of(cls, key: str, kind: Callable[[Terms], Kind], asked: Asked) -> Wanted:
        known = Asked.__annotations__
        if unknown := asked.keys() - known.keys():
            raise TypeError(
                f"{', '.join(sorted(unknown))}: not known; a lock takes {', '.join(known)}"
            )
        label, on_lost = asked.get("label"), asked.get("on_lost")
        if on_lost is not None and not callable(on_lost):
            raise TypeError(f"on_lost {on_lost!r} is not valid: it has to be a function")
        terms = Terms(
            key,
            seconds("lease", asked.get("lease", 30.0)),
            seconds("min_interval", asked.get("min_interval", 0.0)),
            asked.get("rules", "recover"),
            "" if label is None else label,
            asked.get("fair", False),
        )
        kind(terms)  # Which checks it.
        wait = seconds_or_none("wait", asked.get("wait", 0.0))
        return cls(terms, kind, wait, label, on_lost)

    def now(self) -> Kind:
        label = default_label() if self.label is None else self.label
        return self.kind(replace(self.terms, label=label))


class BaseLock:
    """What locks for threads and for event loops have in common."""

    def __init__(self, access: Access, wanted: Wanted) -> None:
        self._access = access
        self._wanted = wanted

    @property
    def key(self) -> str:
        """The key, or the name."""
        return self._wanted.terms.key

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.key!r}>"

    def _request(self, wait: Any) -> Request:
        wait = self._wanted.wait if wait is OWN else seconds_or_none("wait", wait)
        return Request(database.wait_of(wait))

    def _begin(self, request: Request, on_lost: Callable[[Lost], object] | None = None) -> Database:
        on = self._access.database()
        own = self._wanted.on_lost
        if on_lost is None and own is not None:
            on_lost = database.told(own)
        on.acquire(self._wanted.now(), request, on_lost)
        return on

    def _looking(self) -> Any:
        kind = self._wanted.now()
        return self._access.database().ask(kind.looking(), kind.terms.lease)

    def _entered(self) -> RuntimeError:
        return RuntimeError(f"this lock of key {self.key!r} is entered: make one for each block")


class Lock(BaseLock):
    """A key to be held, and what it is asked for with.

    The blocks of an object follow each other. One that is entered while another runs raises
    :class:`RuntimeError`: each thread makes a lock of its own.
    """

    def __init__(self, access: Access, wanted: Wanted) -> None:
        super().__init__(access, wanted)
        self._lease: Lease | None = None
        #: By process: a thread may have been inside at a fork.
        self._entered_in: dict[int, threading.Lock] = {}

    def acquire(self, wait: Seconds | None = OWN) -> Lease | Refusal:
        """Waits for the key, as long as the lock does, or as ``wait`` says; ``None`` has no end.

        Returns a lease, or a refusal, which is false.
        """
        request = self._request(wait)
        try:
            on = self._begin(request)
            acquired = result_of(on, request.asking.result)
            if isinstance(acquired, Refusal):
                return acquired
            lease = Lease(on, acquired)
        except BaseException:
            request.asking.leave()
            raise
        request.delivered()
        return lease

    def try_acquire(self) -> Lease | Refusal:
        """Asks once, without waiting for a holder."""
        return self.acquire(0.0)

    def locked(self) -> bool:
        """Asks the database whether a claim would be refused because of another claim."""
        held: bool = result_of(self._access.database(), self._looking())
        return held

    def __enter__(self) -> Lease:
        is_entered = self._entered_in.setdefault(os.getpid(), threading.Lock())
        if not is_entered.acquire(blocking=False):
            raise self._entered()
        try:
            acquired = self.acquire()
            if isinstance(acquired, Refusal):
                raise Refused(acquired)
        except BaseException:
            is_entered.release()
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
            is_entered = self._entered_in.get(os.getpid())
            if is_entered is not None:  # Else it was entered before the fork.
                is_entered.release()
            lease.__exit__(kind, error, trace)


class ReadWrite(Generic[L]):
    """A name that many hold for reading, or one for writing."""

    def __init__(self, locks: BaseLocks[L], name: str, asked: Asked) -> None:
        self._locks = locks
        self._name = name
        self._asked = asked
        Wanted.of(name, Reader, asked)

    def read(self) -> L:
        """Returns the readers' side: it excludes writers. The lease has a ``writer_token``."""
        return self._locks._lock(self._name, Reader, self._asked)

    def write(self) -> L:
        """Returns the writers' side: it excludes readers and other writers."""
        return self._locks._lock(self._name, Writer, self._asked)


class BaseLocks(ABC, Generic[L]):
    """The locks of one database. All of a process share its sessions."""

    def __init__(self, source: Source, label: str | None = None) -> None:
        self._access = Access(source)
        self._label = label

    @abstractmethod
    def _make(self, wanted: Wanted) -> L: ...

    def _lock(self, key: str, kind: Callable[[Terms], Kind], asked: Asked) -> L:
        return self._make(Wanted.of(key, kind, self._labelled(asked)))

    def _labelled(self, asked: Asked) -> Asked:
        own: Asked = {} if self._label is None else {"label": self._label}
        return {**own, **asked}

    def lock(self, key: str, **asked: Unpack[Asked]) -> L:
        """Returns a lock on a key."""
        return self._lock(key, One, asked)

    def lock_all(self, keys: Sequence[str], **asked: Unpack[Asked]) -> L:
        """Returns a lock on all of these keys: none is held without the others."""
        if isinstance(keys, str):
            raise TypeError("keys has to be a list of keys, not a str")
        keys = tuple(keys)  # The caller may change its list later.
        if not keys:
            raise ValueError("a set of keys has to have at least one key")
        return self._lock(keys[0], lambda terms: All(terms, keys), asked)

    def semaphore(self, name: str, permits: int, **asked: Unpack[Asked]) -> L:
        """Returns a lock that at most so many hold at a time: 1 to 100."""
        return self._lock(name, lambda terms: Permit(terms, permits), asked)

    def read_write(self, name: str, **asked: Unpack[Asked]) -> ReadWrite[L]:
        """Returns a lock that many hold for reading, or one for writing."""
        return ReadWrite(self, name, self._labelled(asked))


class Locks(BaseLocks[Lock]):
    """The locks of one database, for programs with threads. All of a process share its sessions.

    They are opened when they are first needed, and end half a minute after the last need; after
    :meth:`close`, or the end of a ``with`` block, at once. Threads may share the object, and so may
    a process that is forked: it gets sessions of its own.
    """

    def _make(self, wanted: Wanted) -> Lock:
        return Lock(self._access, wanted)

    def leader(self, name: str, **asked: Unpack[Asked]) -> Generator[Lease, None, None]:
        """Waits to be the leader, again and again, and yields the lease of each term.

        A term ends with the loop's body, which returns when ``lease.lost`` is true. It is released
        with S, or abandoned if the body leaves the loop, by an exception or by ``break``.
        """
        asked.setdefault("wait", None)
        return _terms(self.lock(name, **asked))

    def job(
        self, key: str, **asked: Unpack[Asked]
    ) -> Callable[[Callable[Concatenate[Lease, P], T]], Callable[P, T | Refusal]]:
        """Runs a function under a key. The function receives the lease first.

        The key may have arguments of the call in braces: ``report-{date}``. A call returns what the
        function returns, or the refusal, which a scheduler may ignore. Coroutine functions,
        generators and methods raise :class:`TypeError`.
        """
        key_of = KeyOf(key)
        Wanted.of(key_of.example, One, asked)  # Checked where the function is defined.

        def decorate(work: Callable[Concatenate[Lease, P], T]) -> Callable[P, T | Refusal]:
            check_work(work, awaits=False)
            key_of.check(work)

            def run(*arguments: P.args, **named: P.kwargs) -> T | Refusal:
                acquired = self.lock(key_of(work, arguments, named), **asked).acquire()
                if isinstance(acquired, Refusal):
                    return acquired
                with acquired:
                    return work(acquired, *arguments, **named)

            return shown_as(run, work)

        return decorate

    def close(self) -> None:
        """Ends the sessions as soon as no lease needs them. No more keys are asked for."""
        self._access.close()

    def __enter__(self) -> Locks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _terms(lock: Lock) -> Generator[Lease, None, None]:
    while True:
        acquired = lock.acquire()
        if isinstance(acquired, Refusal):
            return
        try:
            # A body that leaves the loop closes the generator, which is not told why: the block
            # abandons the term.
            with acquired:
                yield acquired
        except Error as error:
            log.warning("a term of leader %r has not ended as it should: %s", lock.key, error)


def connect(source: Source, *, label: str | None = None) -> Locks:
    """Returns the locks of a database. Nothing is opened until the first is asked for.

    ``source`` is a URL, the ``Path`` of an SQLite file, a function that opens connections, or a
    connection, a pool or an engine, of which the place alone is read. ``label`` is what others see
    of the holder.
    """
    locks = Locks(source, label)
    locks._access.is_kept = True
    return locks


def lock(source: Source, key: str, **asked: Unpack[Asked]) -> Lock:
    """Holds a key in a ``with`` block. Raises :class:`Refused` if it is not free in time."""
    return Locks(source).lock(key, **asked)


def try_acquire(source: Source, key: str, **asked: Unpack[Asked]) -> Lease | Refusal:
    """Asks for a key once. Returns a lease, or a refusal, which is false."""
    return Locks(source).lock(key, **asked).try_acquire()


def job(
    source: Source, key: str, **asked: Unpack[Asked]
) -> Callable[[Callable[Concatenate[Lease, P], T]], Callable[P, T | Refusal]]:
    """Runs a function under a key, as :meth:`Locks.job` does."""
    return Locks(source).job(key, **asked)
