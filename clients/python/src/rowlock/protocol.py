"""The protocol, without input or output: generators that say what to send and how long to pause.

A driver (``lease.py``, ``aio.py``) carries each step out and sends the result back. Time is that of
``clock.py``, counted from before a request is sent, so a lease ends here before the database could
grant its key to another holder.
"""

from __future__ import annotations

import math
import os
import random
import threading
import unicodedata
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from . import clock
from .errors import Contention, Lost, Outage, Refusal, Unavailable, Unknown

#: For how many seconds a claim without a reply is repeated.
TIME_LIMIT = 5.0
#: How many seconds a pause lasts at most, until the clock is read again. The pauses of threads and
#: of event loops do not count the time that the machine sleeps.
LOOK = 1.0
#: How many characters of a label the column holds.
LABEL = 45
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
RULES = ("recover", "article")


@dataclass(frozen=True)
class Terms:
    """What is asked for. Durations are in seconds."""

    key: str
    lease: float = 30.0
    min_interval: float = 0.0
    rules: str = "recover"
    label: str | None = None

    def __post_init__(self) -> None:
        check_seconds("lease", self.lease)
        check_seconds("min_interval", self.min_interval)
        size = len(self.key.encode())
        if (
            not 1 <= size <= 255
            or "\0" in self.key
            or is_space(self.key[0])
            or is_space(self.key[-1])
        ):
            raise ValueError(
                f"key {self.key[:80]!r} is not valid: "
                "use 1 to 255 bytes of UTF-8, without NUL and without white space at the ends"
            )
        if not 0.1 <= self.lease <= 30 * 86400:
            raise ValueError(f"lease {self.lease} is not valid: it has to be from 0.1 s to 30 days")
        if not 0 <= self.min_interval <= 3653 * 86400:
            raise ValueError(
                f"min_interval {self.min_interval} is not valid: "
                "it has to be from zero to ten years"
            )
        if self.rules not in RULES:
            raise ValueError(f"rules {self.rules!r} are not known: they are recover or article")
        label = self.label or ""
        if len(label) > LABEL or any(unicodedata.category(one) == "Cc" for one in label):
            raise ValueError(
                f"label {label[:80]!r} is not valid: "
                f"it has to have at most {LABEL} characters, and no control characters"
            )


def check_seconds(name: str, value: object) -> None:
    """Raises :class:`ValueError` for a duration that is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} {value!r} is not valid: it has to be a finite number of seconds")


def is_space(character: str) -> bool:
    """Returns whether the database and the other clients count a character as white space."""
    return character.isspace() and character not in "\x1c\x1d\x1e\x1f"


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
class Call:
    """A request: a method of the session, and its arguments."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Pause:
    """How many seconds to pause."""

    seconds: float


@dataclass
class State:
    """What is known of a lease. The deadline moves forward; a loss is final."""

    claim: Claim
    lease: float
    #: When the last successful request was sent.
    sent: float
    deadline: float = field(init=False)
    why_lost: str | None = field(default=None, init=False)
    ended: bool = field(default=False, init=False)
    #: What the last renewal failed with.
    failure: str | None = field(default=None, init=False)
    #: The process that holds the lease. A forked child has a copy that is renewed by no thread.
    process: int = field(default_factory=os.getpid, init=False)
    # A signal handler may ask while the interrupted code holds the mutex.
    _mutex: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.deadline = deadline(self.sent, self.lease)

    def renewed(self, sent: float) -> bool:
        """Moves the deadline, unless the lease is lost. A reply that comes late moves nothing."""
        with self._mutex:
            if self._is_lost():
                return False
            self.sent = max(self.sent, sent)
            self.deadline = max(self.deadline, deadline(sent, self.lease))
            return True

    def lose(self, why: str) -> None:
        """Records a loss, unless the claim is being ended or is lost already."""
        with self._mutex:
            if not self.ended and self.why_lost is None:
                self.why_lost = why

    @property
    def lost(self) -> bool:
        """Returns whether the lease is lost, also while no renewal has a reply."""
        if self.is_copy:  # Whose mutex a thread may have held that the child does not have.
            return True
        with self._mutex:
            return self._is_lost()

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


def patience(lease: float) -> float:
    """Returns for how many seconds a request waits for its reply before its connection is closed.

    A renewal leaves time for another one on a new connection.
    """
    return max(1.0, min(lease / 3, TIME_LIMIT))


def deadline(sent: float, lease: float) -> float:
    """Returns when a lease counts as lost: a twentieth early, for clocks that diverge."""
    return sent + lease - lease / 20


def from_micros(micros: int | None) -> datetime | None:
    """Returns the time that is so many microseconds after 1970, or none if Python has no such."""
    try:
        return None if micros is None else EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        return None


class Pauses:
    """Pauses that double, with jitter."""

    def __init__(self, first: float, longest: float) -> None:
        self._bound = first
        self._longest = longest

    def next(self) -> float:
        bound = self._bound
        self._bound = min(2 * bound, self._longest)
        return bound * random.uniform(0.5, 1)


def pausing(until: float) -> Generator[Pause, Any, None]:
    """Pauses until a time of the clock, at least once, and looks at the clock after each step."""
    while True:
        left = until - clock.now()
        yield Pause(max(0.0, min(left, LOOK)))
        if left <= LOOK:
            return


def acquiring(
    terms: Terms, holder: str, wait: float
) -> Generator[Call | Pause, Any, tuple[State, Previous | None] | Refusal]:
    """Claims a key until it is granted, or the wait is over.

    The same holder repeats a claim without a reply: it then receives the claim that was granted.
    Returns the state of the lease and the claim that it took over from, or the refusal.
    """
    until = clock.now() + wait
    unanswered_since: float | None = None
    pauses = Pauses(0.02, 1.0)
    while True:
        sent = clock.now()
        reply: Granted | Refusal | None = None
        failure: BaseException | None = None
        try:
            reply = yield Call("claim", (terms, holder))
        except Contention:
            reply = Refusal(terms.key, "busy", retry_after=0.1)
        except Outage as outage:
            failure = outage.__cause__ or outage
            if outage.sent and unanswered_since is None:
                unanswered_since = sent
            if outage.permanent and unanswered_since is None:
                until = sent
        now = clock.now()
        if isinstance(reply, Granted):
            if now < deadline(sent, terms.lease):
                return State(reply.claim, terms.lease, sent), reply.previous
            unanswered_since = sent if unanswered_since is None else unanswered_since
        elif reply is not None and (unanswered_since is None or reply.reason != "busy"):
            left = until - now
            window = reply.retry_after if reply.reason == "within_window" else None
            if left <= 0 or (window is not None and window > left):
                return reply
            pause = window if window is not None else min(pauses.next(), reply.retry_after or left)
            yield from pausing(now + max(0.001, min(pause, left)))
            continue
        if unanswered_since is None:
            limit = until
            if now >= limit:
                raise Unavailable(f"key {terms.key!r} was not claimed: {failure}") from failure
        else:
            limit = max(until, unanswered_since + TIME_LIMIT)
            if now >= limit:
                raise Unknown(
                    f"the claim on key {terms.key!r} has no reply: "
                    "it may stand until its lease ends"
                ) from failure
        yield Pause(min(pauses.next(), limit - now))


def renewing(state: State) -> Generator[Call | Pause, Any, None]:
    """Renews a lease at every third of its duration, until it is lost or ended.

    A renewal without a reply is unknown, not lost: the deadline stands, and it is sent again
    sooner.
    """
    sooner = min(state.lease / 12, 1.0)
    while True:
        yield from pausing(state.sent + state.lease / 3)
        while not (state.lost or state.ended):
            sent = clock.now()
            try:
                outcome = yield Call("change", ("renew", state.claim, state.lease))
            except Exception as error:
                outcome, state.failure = "unknown", str(error.__cause__ or error)
            else:
                busy = "another transaction has locked its row"
                state.failure = busy if outcome == "busy" else None
            if outcome == "lost":
                state.lose("its row was seen without the claim")
            elif outcome == "done" and state.renewed(sent):
                break
            else:
                yield Pause(sooner * random.uniform(0.5, 1))
        if state.lost or state.ended:
            return


def ending(state: State, change: str, *arguments: Any) -> Generator[Call | Pause, Any, None]:
    """Ends a claim: sends ``release`` or ``abandon`` until it has a reply.

    It gives up when the lease ends, and after :data:`TIME_LIMIT`.
    """
    claim = state.claim
    until = min(state.deadline, clock.now() + TIME_LIMIT)
    unanswered = False
    pauses = Pauses(0.002, min(state.lease / 12, 1.0))
    while True:
        failure: BaseException | None = None
        try:
            outcome = yield Call("change", (change, claim, *arguments))
        except Contention as contention:
            outcome, failure = "busy", contention.__cause__
        except Outage as outage:
            outcome, failure = "unknown", outage.__cause__ or outage
            unanswered |= outage.sent
        if outcome == "done":
            return
        if outcome == "lost" and not unanswered:
            raise Lost(claim.key, claim.token, "its row was seen without the claim")
        left = until - clock.now()
        if outcome == "busy" and not unanswered and left <= 0:
            raise Unavailable(
                f"the claim on key {claim.key!r} was not ended, and ends with its lease: another "
                "transaction has locked its row. One that has confirmed the claim has to commit "
                "inside the block"
            ) from failure
        if outcome == "lost" or left <= 0:
            raise Unknown(
                f"it is not known whether the claim on key {claim.key!r} was ended: "
                "it ends with its lease"
            ) from failure
        yield Pause(min(pauses.next(), left))
