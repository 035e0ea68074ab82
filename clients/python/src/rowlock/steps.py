"""The steps of the protocol, without input or output: what to send, and how long to pause."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from . import clock
from .errors import Contention, Error, Lost, Outage, Overload, Refusal, Unavailable, Unknown
from .protocol import (
    BUSY,
    Acquired,
    Call,
    Change,
    Claim,
    Granted,
    Pause,
    State,
    Steps,
    T,
    Wait,
    deadline,
    patience,
)
from .terms import Terms

#: For how many seconds a claim without a reply is repeated.
TIME_LIMIT = 5.0
#: A lease of fewer seconds does not outlast two attempts to connect, which take two each.
SHORT = 7.0
LOCKED = (
    "another transaction has locked its row. One that has confirmed the claim has to commit inside "
    "the block"
)


class Pauses:
    """Pauses that grow, with jitter."""

    def __init__(self, first: float, longest: float, growth: float = 2.0) -> None:
        self._bound = first
        self._longest = longest
        self._growth = growth

    def next(self) -> float:
        bound = self._bound
        self._bound = min(self._growth * bound, self._longest)
        return bound * random.uniform(0.5, 1)


def asking(terms: Terms, holder: str, alone: bool = False) -> Steps[list[Granted] | Refusal]:
    """Asks for one key."""
    (reply,) = yield Call("claim", [(terms, holder)], alone=alone)
    return reply if isinstance(reply, Refusal) else [reply]


#: Asks once for what is wanted, as this holder.
Ask: TypeAlias = Callable[[str], Steps[list[Granted] | Refusal]]


@dataclass
class Attempt:
    """A claim that is asked for."""

    holder: str = field(default_factory=lambda: str(uuid.uuid4()))
    #: Since when it may stand, without a reply.
    since: float | None = None


def acquiring(
    ask: Ask,
    terms: Terms,
    wait: Wait,
    pauses: Pauses,
    keys: Sequence[str] = (),
    longest: float = float("inf"),
    attempt: Attempt | None = None,
) -> Steps[Acquired | Refusal]:
    """Asks until the claim is granted, or the wait is over.

    The same holder repeats a claim without a reply: it then receives the claim that was granted. A
    release of one of ``keys`` is worth another request; without them, that of the refused key. No
    pause is longer than ``longest``. After :class:`Unknown`, another call goes on with the same
    ``attempt``.
    """
    key, lease = terms.key, terms.lease
    attempt = attempt or Attempt()
    began = clock.now()
    was_free = False
    while True:
        sent = clock.now()
        reply: list[Granted] | Refusal | None = None
        failure: BaseException | None = None
        permanent = False
        try:
            reply = yield from ask(attempt.holder)
        except Overload as overload:
            failure = overload.__cause__ or overload
        except Contention:
            reply = Refusal(key, "busy", retry_after=BUSY)
        except Outage as outage:
            failure = outage.__cause__ or outage
            if outage.sent and attempt.since is None:
                attempt.since = sent
            permanent = outage.permanent and attempt.since is None
        now = clock.now()
        if reply is not None:
            wait.failed(None)
        if isinstance(reply, list):
            if now < deadline(sent, lease):
                state = State(tuple(one.claim for one in reply), lease, sent)
                taken_over = [one.previous for one in reply if one.previous]
                return Acquired(state, taken_over[0] if taken_over else None)
            attempt.since = sent if attempt.since is None else attempt.since
        elif reply is not None and (attempt.since is None or reply.reason != "busy"):
            attempt.since = None
            left = wait.until - now
            wait.is_slow = reply.reason == "busy"
            if reply.reason == "busy" and now < began + BUSY:
                yield Pause(0.005)
                continue
            interval = reply.retry_after if reply.reason == "within_min_interval" else None
            if left <= 0 or (interval is not None and interval > left):
                return reply
            pause = (
                interval if interval is not None else min(pauses.next(), reply.retry_after or left)
            )
            awaited = keys or [reply.key]
            was_free = not was_free and (yield from _is_free(reply, awaited))
            if not was_free:
                yield Pause(max(0.001, min(pause, left, longest)), awaited)
            if wait.is_left:
                return reply
            continue
        limit = wait.until
        if attempt.since is not None:
            limit = max(limit, attempt.since + TIME_LIMIT)
        if now >= limit or permanent:
            if attempt.since is None:
                unavailable = Unavailable(f"key {key!r} was not claimed: {failure}")
                unavailable.permanent = permanent
                raise unavailable from failure
            raise Unknown(
                f"the claim on key {key!r} has no reply: it may stand until its lease ends"
            ) from failure
        if failure is not None:
            wait.failed(str(failure))
        yield Pause(min(pauses.next(), limit - now))


def _is_free(refusal: Refusal, keys: Sequence[str]) -> Steps[bool]:
    """Asks to be told of a release, where there is a listener.

    Returns whether one of the keys is free already. What fails is a hint that is missed.
    """
    if refusal.reason not in ("held", "timed_out_unfinished"):
        return False
    try:
        are_free: list[bool] = yield Call("await", keys)
    except Exception:
        return False
    return any(are_free)


def once_more(read: Callable[[], Steps[T]]) -> Steps[T]:
    """Does what comes before a claim, and again if the connection that was open is lost."""
    try:
        return (yield from read())
    except Outage as outage:
        if not outage.sent:
            raise
    try:
        return (yield from read())
    except Outage as outage:  # No claim was sent.
        raise Outage(sent=False, permanent=outage.permanent) from outage.__cause__


def reading(read: Callable[[], Steps[T]], wait: Wait, least: float = 0.0) -> Steps[T]:
    """Repeats what changes nothing, or may be sent twice, while it has no reply.

    It gives up when the wait is over, and ``least`` seconds have passed.
    """
    pauses = Pauses(0.002, 0.5)
    until = clock.now() + least
    while True:
        try:
            result = yield from read()
        except (Contention, Outage) as error:
            cause = error.__cause__ or error
            permanent = isinstance(error, Outage) and error.permanent
            if permanent or clock.now() >= max(until, wait.until):
                raise Unavailable(f"the database could not be read: {cause}") from cause
            if type(error) is not Contention:
                wait.failed(str(cause))
        else:
            wait.failed(None)
            return result
        yield Pause(pauses.next())


def renewing(state: State, tell_failure: Callable[[str | None], object]) -> Steps[None]:
    """Renews a lease at every third of its duration, until it is lost, ended or dropped.

    A renewal without a reply is unknown, not lost: the deadline stands, and it is sent again
    sooner. The first failure in a row is told, and so is its end. A claim that is dropped before a
    lease has it is put back.
    """
    yield from _opening(state)
    yield from _keeping(state, tell_failure)
    if state.abandons:
        yield from undoing(state, "abandon")
    if state.dropped and not state.delivered and state.end():
        yield from undoing(state)


def _opening(state: State) -> Steps[None]:
    """Opens the session of renewals early for a short lease, which has no time for that later."""
    if state.lease < SHORT:
        try:
            yield Call("open", [None])
        except Exception:
            return  # The first renewal tries again.


def _keeping(state: State, tell_failure: Callable[[str | None], object]) -> Steps[None]:
    sooner = min(state.lease / 12, 1.0)
    busy = False
    while not (state.ended or state.dropped or state.lost):
        due = state.sent + state.lease / 3 - clock.now()
        yield Pause(due, early=state.lease / 12)
        if clock.now() < state.sent + state.lease / 4:  # Woken for another reason.
            continue
        while state.begin_renewal():
            sent, failed = clock.now(), state.failure
            outcomes: list[str] = []
            try:
                renewals = [Change(claim, state.lease) for claim in state.claims]
                outcomes = yield Call("renew", renewals, alone=busy or state.confirmed)
            except Exception as error:
                state.failure = str(error.__cause__ or error)
                busy = True  # It may be another's row that took long.
            else:
                busy = "busy" in outcomes
                own = "its own transaction, which has confirmed it, has locked its row"
                other = "another transaction has locked its row"
                state.failure = (own if state.confirmed else other) if busy else None
            finally:
                state.renewing = False
            if "lost" in outcomes:
                state.lose("its row was seen without the claim")
                return
            if (failed is None) != (state.failure is None):
                tell_failure(state.failure)
            if outcomes and not busy and state.renewed(sent):
                state.confirmed = False  # Its transaction has ended.
                break
            yield Pause(sooner * random.uniform(0.5, 1))


def watching(state: State, on_lost: Callable[[Lost], object]) -> Steps[None]:
    """Tells of a loss as soon as it is known, and at the deadline at the latest."""
    # A loss comes first: a caller that sees it may have ended the lease.
    while not (state.lost or state.ended or state.dropped):
        yield Pause(state.deadline - clock.now())
    if state.lost:
        on_lost(state.error())


def ending(
    state: State,
    change: str,
    value: Any = None,
    tell: Callable[[Error], object] | None = None,
) -> Steps[None]:
    """Ends claims: sends ``release``, ``abandon`` or ``put back`` until each has a reply.

    It fails when the lease ends, and after :data:`TIME_LIMIT`. With ``tell``, it tells of that
    failure, and goes on until the lease ends.
    """
    yield from _renewed_before(state, change)
    soon = min(state.deadline, clock.now() + TIME_LIMIT)
    until = state.deadline if tell else soon
    left = list(state.claims)
    lost: Claim | None = None
    unanswered = was_told = False
    pauses = Pauses(0.002, min(state.lease / 12, 1.0))
    while True:
        failure: BaseException | None = None
        outcomes: list[str] = ["unknown"] * len(left)
        try:
            requests = [Change(claim, value) for claim in left]
            outcomes = yield Call(change, requests, alone=was_told)
        except (Contention, Outage) as error:
            failure = error.__cause__ or error
            unanswered |= isinstance(error, Outage) and error.sent
            if type(error) is Contention:
                outcomes = ["busy"] * len(left)
        for claim, outcome in zip(tuple(left), outcomes, strict=True):
            if outcome in ("done", "lost"):
                left.remove(claim)
                lost = claim if outcome == "lost" else lost
        if not left and lost is None:
            return
        if not left and lost is not None and not unanswered:
            raise Lost(lost.key, lost.token, "its row was seen without the claim")
        now = clock.now()
        if left and now < soon:
            yield Pause(min(pauses.next(), soon - now))
            continue
        key = (left or [state.claim])[0].key
        told: Unavailable | Unknown
        if left and not unanswered:
            why = failure if "unknown" in outcomes else LOCKED
            # Of several keys, others may be free.
            told = (Unavailable if len(left) == len(state.claims) else Unknown)(
                f"the claim on key {key!r} was not ended, and ends with its lease: {why}"
            )
        else:
            told = Unknown(
                f"it is not known whether the claim on key {key!r} was ended: "
                "it ends with its lease"
            )
        told.__cause__ = failure
        if not left or now >= until:
            raise told
        if tell and not was_told:
            tell(told)
            # From here on it holds up no other request.
            was_told, pauses = True, Pauses(0.5, min(state.lease / 12, 5.0))
        del told
        yield Pause(min(pauses.next(), until - now))


def undoing(state: State, change: str = "put back") -> Steps[None]:
    """Puts a claim back, under which no work was begun. What fails ends with its lease.

    One that took over a claim is abandoned by that: the next holder is told of a takeover too.
    """
    try:
        yield from ending(state, change)
    except (Lost, Unknown, Unavailable):
        return


def extending(state: State, length: float) -> Steps[None]:
    """Extends a lease to so many seconds from now."""
    until = clock.now() + min(TIME_LIMIT, state.time_left)
    pauses = Pauses(0.002, 0.5)
    unanswered = False
    while True:
        if state.ended or state.lost:  # It would undo an abandon.
            raise state.error()
        sent = clock.now()
        failure: BaseException | str | None = "another transaction has locked its row"
        try:
            outcomes = yield Call("renew", [Change(claim, length) for claim in state.claims])
        except (Contention, Outage) as error:
            failure = error.__cause__ or error
            unanswered |= isinstance(error, Outage) and error.sent
        else:
            if "lost" in outcomes:
                state.lose("its row was seen without the claim")
            if state.ended or state.lost:
                raise state.error()
            if "busy" not in outcomes and state.renewed(sent, length):
                return
        if clock.now() >= until:
            kind = Unknown if unanswered else Unavailable
            raise kind(f"the lease of key {state.claim.key!r} was not extended: {failure}")
        yield Pause(pauses.next())


def _renewed_before(state: State, change: str) -> Steps[None]:
    """Waits for a renewal in flight.

    One that the database carries out after an abandon would undo it: one that is not over by then,
    as while its session is opened anew, is followed by another abandon. After a release it changes
    nothing.
    """
    limit = min(state.lease / 12, 1.0) if change == "release" else patience(state.lease) + 0.5
    until = min(state.deadline, clock.now() + limit)
    while state.renewing and clock.now() < until:
        yield Pause(0.002)
    state.abandons = state.renewing and change == "abandon"
