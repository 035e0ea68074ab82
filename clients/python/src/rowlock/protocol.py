"""The words of the protocol: claims, requests, and what is known of a lease.

A loop (``loop.py``) carries the steps (``steps.py``) out and sends each result back. Time is that
of ``clock.py``, counted from before a request is sent, so a lease ends here before the database
could grant its key to another holder.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from . import clock
from .errors import Lost

#: For how many seconds a request waits for its reply at most.
PATIENCE = 5.0
#: For how many seconds a claim is repeated while another transaction has the row locked.
BUSY = 0.1


@dataclass(frozen=True)
class Previous:
    """The claim that a claim has taken over from."""

    token: int
    label: str


@dataclass(frozen=True)
class Claim:
    """The right to a key, as recorded in the row."""

    key: str
    holder: str
    token: int


@dataclass(frozen=True)
class Granted:
    """The reply to a claim that was granted."""

    claim: Claim
    previous: Previous | None


@dataclass(frozen=True)
class Change:
    """A change of a claim: of its lease in seconds, or of its row to a status, or to no value."""

    claim: Claim
    value: Any = None


@dataclass(frozen=True)
class Range:
    """The keys from the first to the last, in the order of their bytes."""

    first: str
    last: str


@dataclass(frozen=True)
class Seen:
    """A row as a look shows it."""

    key: str
    #: ``free``, ``held``, ``expired`` or ``held_by_another_program``.
    state: str
    token: int
    holder: str | None
    label: str
    #: When the lease ends, in microseconds after 1970, and in how many seconds.
    until: int | None
    left: float | None

    @property
    def is_held(self) -> bool:
        """Whether a claim on it would be refused."""
        return self.state in ("held", "held_by_another_program")


@dataclass(frozen=True)
class Call:
    """Requests of one kind, each of which has a reply. Those of several tasks travel together."""

    kind: str
    requests: Sequence[Any]
    #: It travels alone, after the others: another transaction is known to have a row locked, or a
    #: repetition because of another request would do it twice.
    alone: bool = False


@dataclass(frozen=True)
class Pause:
    """How many seconds to pause. A release of one of the keys ends the pause."""

    seconds: float
    keys: Sequence[str] = ()
    #: By how many seconds the pause may end early, if others end then.
    early: float = 0.0


T = TypeVar("T")
Steps: TypeAlias = Generator[Call | Pause, Any, T]


@dataclass
class Wait:
    """Until when a claim is waited for. A caller that goes away ends it."""

    until: float
    #: The caller has gone away.
    is_left: bool = False
    #: The row was locked by another transaction: requests for other rows go first.
    is_slow: bool = False
    #: Is told what the requests fail with, or none.
    tell: Callable[[str | None], object] = lambda _: None
    failure: str | None = None

    def failed(self, why: str | None) -> None:
        """Tells of the first failure in a row, and of its end."""
        was, self.failure = self.failure, why
        if (was is None) != (why is None):
            self.tell(why)

    def leave(self) -> None:
        self.until, self.is_left = 0.0, True


@dataclass
class State:
    """What is known of a lease. The deadline moves forward; a loss is final."""

    claims: tuple[Claim, ...]
    lease: float
    #: When the last successful request was sent.
    sent: float
    deadline: float = field(init=False)
    why_lost: str | None = field(default=None, init=False)
    ended: bool = field(default=False, init=False)
    #: A lease has it. Until then, a claim that is dropped is put back.
    delivered: bool = field(default=False, init=False)
    #: No variable has the lease any more: it is renewed no more.
    dropped: bool = field(default=False, init=False)
    #: A renewal is in flight.
    renewing: bool = field(default=False, init=False)
    #: An abandon is sent beside that renewal, which may be carried out later and undo it.
    abandons: bool = field(default=False, init=False)
    #: A transaction of the application has confirmed it, and may have its row locked.
    confirmed: bool = field(default=False, init=False)
    #: What the last renewal failed with.
    failure: str | None = field(default=None, init=False)
    #: Wakes what renews the lease, and what watches it.
    wakes: list[Callable[[], object]] = field(default_factory=list, init=False, repr=False)
    #: The process that holds the lease. A forked child has a copy that is renewed by no thread.
    process: int = field(default_factory=os.getpid, init=False)
    # No mutex: a signal handler may wait for a thread that would wait for the interrupted code.
    #: Taken once, by what ends the lease.
    _end: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.deadline = deadline(self.sent, self.lease)

    @property
    def claim(self) -> Claim:
        """Returns the first claim, which names the lease."""
        return self.claims[0]

    def begin_renewal(self) -> bool:
        """Returns whether the lease is to be renewed. No end is sent until the reply."""
        self.renewing = True  # Before the look at what an end sets before it looks at this.
        self.renewing = not (self.ended or self.dropped or self._is_lost())
        return self.renewing

    def renewed(self, sent: float, lease: float | None = None) -> bool:
        """Moves the deadline, unless the lease is lost. A reply that comes late moves nothing."""
        if self._is_lost():
            return False
        if lease is None or lease >= self.lease:
            self.sent = max(self.sent, sent)
        self.deadline = max(self.deadline, deadline(sent, lease or self.lease))
        return True

    def lose(self, why: str) -> None:
        """Records a loss, unless the claim is being ended or is lost already."""
        if not self.ended and self.why_lost is None:
            self.why_lost = why
        self.wake()

    def end(self) -> bool:
        """Begins to end the lease. Returns false if that was begun before."""
        is_first = self._end.acquire(blocking=False)
        self.ended = True
        self.wake()
        return is_first

    def drop(self) -> None:
        """Ends the renewals. It takes no mutex that the interrupted code may hold."""
        self.dropped = True
        self.wake()

    def wake(self) -> None:
        for wake in self.wakes:
            wake()

    @property
    def lost(self) -> bool:
        """Returns whether the lease is lost, also while no renewal has a reply."""
        # A forked child has no part in its parent's leases.
        return self.is_copy or self._is_lost()

    def _is_lost(self) -> bool:
        if self.why_lost is None and not self.ended and clock.now() >= self.deadline:
            failed = f", the last one: {self.failure}" if self.failure else ""
            self.why_lost = f"no renewal succeeded before its lease ended{failed}"
        return self.why_lost is not None

    @property
    def time_left(self) -> float:
        """Returns for how many seconds the claim stands without another renewal."""
        over = self.ended or self.lost
        return 0.0 if over else max(0.0, self.deadline - clock.now())

    @property
    def is_copy(self) -> bool:
        """Returns whether this process is a fork of the one that holds the lease."""
        return self.process != os.getpid()

    def error(self) -> Lost:
        """Returns the error that reports the loss."""
        why = self.why_lost or "it was ended"
        if self.is_copy:
            why = f"process {self.process} holds it, of which this process is a fork"
        return Lost(self.claim.key, self.claim.token, why)


@dataclass(frozen=True)
class Acquired:
    """A lease that was granted."""

    state: State
    previous: Previous | None
    #: Of a reader: the token of the last writer.
    writer_token: int | None = None


def patience(lease: float) -> float:
    """Returns for how many seconds a request waits for its reply before its connection is closed.

    A renewal leaves time for another one on a new connection.
    """
    return max(1.0, min(lease / 3, PATIENCE))


def deadline(sent: float, lease: float) -> float:
    """Returns when a lease counts as lost: a twentieth early, for clocks that diverge."""
    return sent + lease - lease / 20
