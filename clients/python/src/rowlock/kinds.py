"""What can be held: a key, several keys, a permit, a name for reading or for writing.

Each consists of claims on keys, as in the crate: ``NAME#1`` to ``NAME#N`` are the permits of a
semaphore, ``NAME#r1`` to ``NAME#r1024`` the readers of a name, which itself is the writer's key.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from . import clock
from .errors import Lost, Refusal, Unavailable, Unknown, from_micros
from .protocol import Acquired, Call, Granted, Pause, Range, Seen, State, Steps, Wait
from .steps import Attempt, Pauses, acquiring, asking, ending, once_more, reading, undoing
from .terms import Terms, check_key
from .tickets import Fair

MAX_PERMITS = 100
MAX_READERS = 1024
#: How many readers' keys are asked for before a reader is refused.
NUMBERS = 8

#: Makes the pauses of a waiter.
Polls: TypeAlias = Callable[[], Pauses]
#: Begins to renew a lease.
Hold: TypeAlias = Callable[[State], None]


class Kind(Protocol):
    """What is to be held."""

    @property
    def terms(self) -> Terms: ...

    def acquiring(self, wait: Wait, polls: Polls, hold: Hold) -> Steps[Acquired | Refusal]: ...

    def looking(self) -> Steps[bool]: ...


def looking_at(keys: Range) -> Steps[list[Seen]]:
    """Looks at the rows of these keys, once."""
    (rows,) = yield Call("look", [keys])
    return list(rows)


def read_rows(keys: Range, wait: Wait | None = None) -> Steps[list[Seen]]:
    """Looks at the rows of these keys, and repeats that for a second at least."""
    return (yield from reading(lambda: looking_at(keys), wait or Wait(0.0), 1.0))


@dataclass(frozen=True)
class One:
    """A key."""

    terms: Terms

    def acquiring(
        self, wait: Wait, polls: Polls, hold: Hold, attempt: Attempt | None = None
    ) -> Steps[Acquired | Refusal]:
        terms = self.terms

        def ask(holder: str) -> Steps[list[Granted] | Refusal]:
            return asking(terms, holder, wait.is_slow)

        if terms.fair:
            return Fair(ask, terms.key, wait).acquiring(terms, polls())
        return acquiring(ask, terms, wait, polls(), attempt=attempt)

    def looking(self) -> Steps[bool]:
        """Returns whether a claim would be refused because of another."""
        rows = yield from read_rows(Range(self.terms.key, self.terms.key))
        return any(row.is_held for row in rows)


class All:
    """All of several keys, or none."""

    def __init__(self, terms: Terms, keys: Sequence[str]) -> None:
        if terms.fair:
            raise ValueError("a set of keys cannot be fair: a key and a semaphore can")
        # In one order everywhere, so that two sets do not wait for each other.
        self._asked = tuple(replace(terms, key=key) for key in sorted(set(keys)))
        self.terms = self._asked[0]

    def acquiring(self, wait: Wait, polls: Polls, hold: Hold) -> Steps[Acquired | Refusal]:
        asked = self._asked

        def ask(holder: str) -> Steps[list[Granted] | Refusal]:
            (reply,) = yield Call("claim all", [(asked, holder)])
            granted: list[Granted] | Refusal = reply
            return granted

        return acquiring(ask, self.terms, wait, polls())

    def looking(self) -> Steps[bool]:
        """Returns whether one of the keys is held."""
        for terms in self._asked:
            rows = yield from read_rows(Range(terms.key, terms.key))
            if any(row.is_held for row in rows):
                return True
        return False


class Permit:
    """One of a number of permits."""

    def __init__(self, terms: Terms, permits: int) -> None:
        if isinstance(permits, bool) or not isinstance(permits, int):
            raise TypeError(f"permits {permits!r} is not valid: it has to be an int")
        if not 1 <= permits <= MAX_PERMITS:
            raise ValueError(f"permits {permits} is not valid: it has to be from 1 to 100")
        check_key(f"{terms.key}#{MAX_PERMITS}")
        self.terms = terms
        self._keys = [f"{terms.key}#{number}" for number in range(1, permits + 1)]

    def acquiring(self, wait: Wait, polls: Polls, hold: Hold) -> Steps[Acquired | Refusal]:
        any_of = AnyOf(self.terms, self._choose)
        if self.terms.fair:
            # A key that is no permit's: semaphores of different sizes have one queue.
            fair = Fair(any_of.ask, f"{self.terms.key}#", wait)
            return fair.acquiring(self.terms, polls(), self._keys)
        return acquiring(any_of.ask, self.terms, wait, polls(), self._keys)

    def _choose(self) -> Steps[list[str]]:
        held = yield from self._held(looking_at)
        free = [key for key in self._keys if key not in held]
        # If none is free, the refusal of one of them says until when.
        return random.sample(free, len(free)) or [random.choice(self._keys)]

    def looking(self) -> Steps[bool]:
        """Returns whether all permits are held."""
        held = yield from self._held(read_rows)
        return held.issuperset(self._keys)

    def _held(self, look: Callable[[Range], Steps[list[Seen]]]) -> Steps[set[str]]:
        name = self.terms.key
        rows = yield from look(Range(f"{name}#1", f"{name}#:"))  # A colon follows the digits.
        return {row.key for row in rows if row.is_held}


class AnyOf:
    """Claims one of several keys. One whose claim has no reply is asked for again."""

    def __init__(self, terms: Terms, choose: Callable[[], Steps[list[str]]]) -> None:
        self._terms = terms
        self._choose = choose
        #: The key whose claim may stand.
        self._sent: str | None = None

    def ask(self, holder: str) -> Steps[list[Granted] | Refusal]:
        reply: list[Granted] | Refusal = []
        if self._sent is not None:
            reply = yield from asking(replace(self._terms, key=self._sent), holder)
            if isinstance(reply, list) or reply.reason == "busy":
                return reply
            self._sent = None
        for key in (yield from once_more(self._choose)):
            self._sent = key
            reply = yield from asking(replace(self._terms, key=key), holder)
            if isinstance(reply, list):
                break
            self._sent = None
        return reply


class _Named:
    """A name with readers and a writer. The rules are ``recover``, without a minimum interval."""

    def __init__(self, terms: Terms) -> None:
        if terms.min_interval or terms.rules != "recover":
            raise ValueError("a read-write lock has the rules recover, and no minimum interval")
        if terms.fair:
            raise ValueError("a read-write lock cannot be fair: a key and a semaphore can")
        check_key(f"{terms.key}#r{MAX_READERS}")
        self.terms = terms
        self._name = One(terms)
        self._readers = Range(f"{terms.key}#r1", f"{terms.key}#r:")
        #: Claims of readers' keys that may stand: forgotten, they would keep writers out.
        self._sent: dict[str, Attempt] = {}

    def _claim_key(self, key: str, polls: Polls) -> Steps[Acquired | Refusal]:
        """Claims this reader's key. One whose claim had no reply is asked for again."""
        attempt = self._sent.setdefault(key, Attempt())
        one = One(replace(self.terms, key=key))
        claimed = yield from one.acquiring(Wait(0.0), polls, lambda _: None, attempt)
        del self._sent[key]
        return claimed

    def _number(self, key: str) -> int | None:
        digits = key.removeprefix(f"{self.terms.key}#r")
        is_number = digits.isascii() and digits.isdecimal() and digits[0] != "0"
        return int(digits) if is_number and int(digits) <= MAX_READERS else None


class Reader(_Named):
    """The right to read beside other readers, and beside no writer."""

    def acquiring(self, wait: Wait, polls: Polls, hold: Hold) -> Steps[Acquired | Refusal]:
        """A reader is in if the name is free after its own claim is granted, or held by itself."""
        pauses = polls()
        while True:
            refusal: Acquired | Refusal | None = None
            try:
                entered = yield from self._enter_if_open(wait, polls)
                refusal = entered
                wait.failed(None)
                if isinstance(entered, Refusal) and entered.key == self.terms.key:
                    if wait.until <= clock.now() and entered.reason != "busy":
                        return entered
                    # Waits like a writer, so that no stream of writers keeps it out.
                    entered = yield from self._enter_in_turn(wait, polls)
                    refusal = entered if isinstance(entered, Refusal) else refusal
                if isinstance(entered, Acquired):
                    return entered
            except (Unavailable, Unknown) as failure:
                permanent = isinstance(failure, Unavailable) and failure.permanent
                if permanent or wait.until <= clock.now():
                    raise
                wait.failed(str(failure))
            left = wait.until - clock.now()
            if left <= 0:
                if isinstance(refusal, Refusal):
                    return refusal
                raise Unavailable(f"key {self.terms.key!r}: the claim of a reader came too late")
            yield Pause(min(pauses.next(), left))

    def _enter_if_open(self, wait: Wait, polls: Polls) -> Steps[Acquired | Refusal | None]:
        reader = yield from self._claim(polls)
        if isinstance(reader, Refusal):
            return reader
        key = self.terms.key
        is_in = False
        try:
            name = next(iter((yield from read_rows(Range(key, key), wait))), None)
            # A row without a token was never claimed: it fences nothing.
            is_open = name is not None and name.state == "free" and name.token > 0
            is_in = is_open and not reader.state.lost
        finally:
            if not is_in:
                yield from undoing(reader.state)
        if is_in and name is not None:
            return replace(reader, writer_token=name.token)
        return None if is_open else _refusal(key, name)

    def _enter_in_turn(self, wait: Wait, polls: Polls) -> Steps[Acquired | Refusal | None]:
        """Claims a reader's key while it holds the name, and passes the name on."""
        name = yield from self._name.acquiring(wait, polls, lambda _: None)
        if isinstance(name, Refusal):
            return name
        is_in = False
        try:
            reader = yield from self._claim(polls)
            # No writer's claim on the name is older than the reader's, if the name was held then.
            is_in = isinstance(reader, Acquired) and not name.state.lost
            is_in = is_in and not wait.is_left
        finally:
            # A takeover that no reader is told of is told to the next holder.
            yield from passing_on(name) if is_in else undoing(name.state)
        if isinstance(reader, Refusal):
            return reader
        if is_in and not reader.state.lost:
            token = name.state.claim.token
            return replace(reader, previous=name.previous, writer_token=token)
        yield from undoing(reader.state)
        return None

    def _claim(self, polls: Polls) -> Steps[Acquired | Refusal]:
        """Claims any reader's key: first of all one whose claim has no reply."""
        name = self.terms.key
        held: set[str] = set()
        key = next(iter(self._sent), f"{name}#r{random.randint(1, MAX_READERS)}")
        while True:
            reader = yield from self._claim_key(key, polls)
            if isinstance(reader, Acquired) or len(held) >= NUMBERS:
                return reader
            held.add(key)
            rows = yield from read_rows(self._readers)
            used = {row.key for row in rows if row.is_held} | held
            keys = [f"{name}#r{number}" for number in range(1, MAX_READERS + 1)]
            free = [one for one in keys if one not in used]
            if not free:
                return reader
            key = random.choice(free)

    def looking(self) -> Steps[bool]:
        """Returns whether a writer keeps readers out."""
        return (yield from self._name.looking())


class Writer(_Named):
    """The right to write beside no reader and no other writer."""

    def acquiring(self, wait: Wait, polls: Polls, hold: Hold) -> Steps[Acquired | Refusal]:
        """The writer claims the name, and waits for the readers that were let in before."""
        while True:
            writer = yield from self._name.acquiring(wait, polls, hold)
            if isinstance(writer, Refusal):
                return writer
            refusal: Refusal | None = None
            drained = False
            try:
                hold(writer.state)
                refusal = yield from self._draining(writer.state, wait, polls)
                drained = refusal is None
            finally:
                if not drained and not writer.state.lost and writer.state.end():
                    yield from undoing(writer.state)
            if refusal is not None:
                return refusal
            if not writer.state.lost:
                return writer
            if wait.until <= clock.now():
                raise writer.state.error()

    def _draining(self, state: State, wait: Wait, polls: Polls) -> Steps[Refusal | None]:
        """Waits for the readers that the first look shows.

        A reader whose claim comes later sees the claim on the name, and is not let in.
        """
        before: set[tuple[str, int]] | None = None
        pauses = polls()
        while not state.lost:
            rows = yield from read_rows(self._readers, wait)
            readers = [row for row in rows if self._number(row.key) and row.state != "free"]
            if before is not None:
                known = before
                readers = [
                    row for row in readers if (row.key, row.token) in known or row.key in self._sent
                ]
            before = {(row.key, row.token) for row in readers}
            left = []
            for row in readers:
                is_taken = row.state == "expired" or row.key in self._sent
                if not is_taken or not (yield from self._ended(row, polls)):
                    left.append(row)
            if not left:
                return None
            refusal = _refusal(left[0].key, left[0])
            time_left = wait.until - clock.now()
            if time_left <= 0:
                return refusal
            pause = min(pauses.next(), time_left, left[0].left or time_left)
            yield Pause(max(0.001, pause), [row.key for row in left])
        return None

    def _ended(self, row: Seen, polls: Polls) -> Steps[bool]:
        """Takes over a reader's claim whose lease is over, and frees its key.

        The reader can then neither renew it nor confirm it.
        """
        try:
            taken = yield from self._claim_key(row.key, polls)
        except (Unavailable, Unknown):
            return False  # The reader is waited for until another look.
        if isinstance(taken, Refusal):
            return False
        yield from passing_on(taken)
        return True

    def looking(self) -> Steps[bool]:
        """Returns whether the name is held for writing, or by readers."""
        rows = yield from read_rows(self._readers)
        if any(row.is_held and self._number(row.key) for row in rows):
            return True
        return (yield from self._name.looking())


def passing_on(taken: Acquired) -> Steps[None]:
    """Ends a claim under which another was made.

    If it took over a claim that was not ended, the row says so. What fails ends with its lease.
    """
    try:
        yield from ending(taken.state, "release", "F" if taken.previous else "S")
    except (Lost, Unknown, Unavailable):
        return


def _refusal(key: str, row: Seen | None) -> Refusal:
    """The refusal that a row is the reason of. A name without a claim is to be claimed first."""
    if row is None or row.state in ("free", "expired"):
        return Refusal(key, "busy", by=row.label if row else None)
    until = from_micros(row.until)
    return Refusal(key, row.state, by=row.label, until=until, retry_after=row.left)
