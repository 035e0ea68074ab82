"""Leases, as their holders have them."""

from __future__ import annotations

import warnings
import weakref
from types import TracebackType
from typing import Any, Literal

from . import confirm
from .database import Database, ended_of, result_of
from .errors import note
from .kinds import looking_at
from .protocol import Acquired, Claim, Range, State, Steps, Wait
from .result import Result
from .steps import reading
from .terms import Seconds, seconds


class BaseLease:
    """What leases for threads and for event loops have in common."""

    def __init__(self, on: Database, acquired: Acquired) -> None:
        self._on = on
        self._state = acquired.state
        weakref.finalize(self, _drop, acquired.state).atexit = False
        #: The claim that this one has taken over from: its holder never ended it.
        self.taken_over_from = acquired.previous
        #: Of a reader: the token of the last writer.
        self.writer_token = acquired.writer_token

    @property
    def claim(self) -> Claim:
        """The key, the holder and the token. Another process takes the claim up with them."""
        return self._state.claim

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The claims on all keys, of which :meth:`Locks.lock_all` has several."""
        return self._state.claims

    @property
    def key(self) -> str:
        """The key; of several keys, the first in order."""
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

    def _ending(self, change: str, value: Any = None) -> Result[None]:
        if self._state.is_copy:
            raise self._state.error()
        if change == "release" and value not in ("S", "F"):
            raise ValueError(f"status {value!r} is not valid: it has to be S or F")
        return self._on.end(self._state, change, value)

    def _extending(self, length: Seconds) -> Result[None]:
        length = seconds("a length", length)
        if not 0.1 <= length <= 30 * 86400:
            raise ValueError(f"a length of {length} is not valid: it is from 0.1 s to 30 days")
        self.check()
        return self._on.extend(self._state, length)

    def _owning(self) -> Result[bool]:
        if self._state.is_copy:
            raise self._state.error()
        return self._on.ask(reading(lambda: _stands(self._state), Wait(0.0)), self._state.lease)

    def _confirming(self) -> None:
        if self._state.is_copy:
            raise self._state.error()
        # Its row stays locked until the transaction ends: its renewals come after those of others.
        self._state.confirmed = True

    @property
    def _is_over(self) -> bool:
        # A forked child leaves its parent's block without an effect on the claim.
        return self._state.ended or self._state.is_copy

    def __bool__(self) -> Literal[True]:
        """A lease is true, and a refusal is false."""
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.key!r} under token {self.token}>"


def _stands(state: State) -> Steps[bool]:
    """Looks whether the rows still have the claims. One that has ended or is lost has none."""
    if state.ended or state.lost:
        return False
    for claim in state.claims:
        rows = yield from looking_at(Range(claim.key, claim.key))
        holder = claim.holder.replace("-", "")
        if not any(
            row.holder == holder and row.token == claim.token and row.state == "held"
            for row in rows
        ):
            return False
    return True


def _drop(state: State) -> None:
    """Ends the renewals of a lease that was dropped. Its work may go on: the key is not freed."""
    state.dropped = True
    if state.is_copy or state.ended:
        return
    state.drop()
    if state.why_lost is None and state.delivered:
        warnings.warn(
            f"the lease of key {state.claim.key!r} was dropped and is renewed no more: "
            "keep it until its work ends, and release it",
            ResourceWarning,
            stacklevel=2,
        )


class Lease(BaseLease):
    """A key that is held. A thread renews it until it is released, abandoned or lost.

    As a context manager it is released at the end: with S, or with F after an exception. If the
    block ends with ``KeyboardInterrupt`` or ``SystemExit``, it is abandoned: the work did not end.
    """

    def release(self, status: str = "S") -> None:
        """Ends the claim after work that is complete: ``S`` for a success, ``F`` for a failure.

        Raises :class:`Lost` if the claim did not stand, :class:`Unknown` if there is no reply, and
        :class:`Unavailable` if another transaction has locked its row for five seconds; of several
        keys, :class:`Unknown` if others were freed. After the last two, a thread goes on to end the
        claim until its lease ends.
        """
        ended_of(self._on, self._ending("release", status))

    def abandon(self) -> None:
        """Ends the claim of work that has stopped: the next holder takes over at once."""
        ended_of(self._on, self._ending("abandon"))

    def extend(self, length: Seconds) -> None:
        """Extends the lease to this length from now, if it is shorter.

        It is for work that stops the process, so that no thread of it renews. Raises :class:`Lost`
        if the claim does not stand, and :class:`Unavailable` if it was not extended.
        """
        result_of(self._on, self._extending(length))

    def owned(self) -> bool:
        """Asks the database whether the claim stands. :attr:`lost` knows it without a request."""
        return result_of(self._on, self._owning())

    def confirm(self, cursor: Any) -> None:
        """Makes the commit of the cursor's transaction depend on the claim.

        It is called first in the transaction. The row stays locked until the transaction ends.
        Raises :class:`Lost` if the claim does not stand: the caller then rolls back.
        """
        self._confirming()
        cursor = confirm.unwrapped(cursor)
        for claim in self.claims:
            sql, values = confirm.confirm_statement(cursor, claim, self._on.kind)
            with confirm.confirming(cursor, claim):
                plain = confirm.plain_cursor(cursor)
                sent = plain.execute(sql, values)
                if hasattr(sent, "__await__"):
                    sent.close()
                    raise TypeError(
                        "this cursor is awaited: a lease of rowlock.aio confirms with it, "
                        "by `await lease.confirm(cursor)`"
                    )
                confirm.read(cursor, claim, plain.fetchone() if plain.description else None)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._is_over:
            return
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
