"""The order of waiters across processes: tickets, as fair handles of the crate draw them.

Each waiter has a numbered row, which it keeps alive. It asks for the key when no living ticket is
before its own. Those that are not fair do not read the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import clock
from .errors import Contention, Outage, Refusal
from .protocol import Acquired, Call, Granted, Pause, Steps, Wait
from .steps import Ask, Pauses, acquiring, once_more
from .terms import Terms

#: For how many seconds a ticket lives without a heartbeat.
ALIVE = 12
#: After how many seconds a waiter keeps its ticket alive.
HEARTBEAT = 4.0
#: For how many seconds the deletion of a ticket is repeated at most: the caller waits for it.
LEAVE = 1.0
#: How many tickets of a queue are read: the front decides the position.
FRONT = 16
#: Stands for a task without a ticket.
NONE = (1 << 63) - 1


@dataclass(frozen=True)
class Position:
    """Where a ticket stands: the seconds that the first ticket before it lives, or none."""

    behind: float | None
    #: Its own row is gone.
    is_missing: bool = False
    #: All tickets at the front have lapsed, which hides the rest.
    is_unknown: bool = False
    lapsed: Sequence[int] = ()


def position(number: int, front: Sequence[tuple[int, float]]) -> Position:
    """Reads the position of a ticket from the front of its queue: numbers, and seconds left."""
    lapsed = tuple(one for one, left in front if one < number and left <= 0)
    for one, left in front:
        if one == number:
            return Position(None, lapsed=lapsed)
        if left > 0:
            return Position(left, lapsed=lapsed)
    is_unknown = len(front) >= FRONT
    return Position(None, number != NONE and not is_unknown, is_unknown, lapsed)


class Fair:
    """Asks for what ``ask`` asks for when it is the caller's turn."""

    def __init__(self, ask: Ask, queue: str, wait: Wait) -> None:
        self._ask = ask
        self._queue = queue
        #: What the caller asks for, which a refusal names.
        self._name = queue
        self._wait = wait
        self._ticket: int | None = None
        self._alive = 0.0
        #: The claim may stand: it keeps others out, and is asked for first of all.
        self._is_sent = False
        self._was_refused = False

    def acquiring(
        self, terms: Terms, pauses: Pauses, keys: Sequence[str] = ()
    ) -> Steps[Acquired | Refusal]:
        self._name = terms.key
        try:
            # A ticket is kept alive between the requests.
            longest = HEARTBEAT
            return (yield from acquiring(self.ask, terms, self._wait, pauses, keys, longest))
        finally:
            if self._ticket is not None:
                yield from self._leave(min(LEAVE, terms.lease / 4))

    def _leave(self, seconds: float) -> Steps[None]:
        """Deletes the ticket, which stops those behind it. One that stays lapses."""
        until = clock.now() + seconds
        while True:
            try:
                yield Call("leave", [(self._ticket,)])
            except Exception as error:
                if not isinstance(error, Contention) or clock.now() >= until:
                    return
                yield Pause(0.005)
            else:
                return

    def ask(self, holder: str) -> Steps[list[Granted] | Refusal]:
        if not self._is_sent:
            refusal = yield from once_more(self._turn)
            if refusal is not None:
                self._was_refused = True
                return refusal
        self._is_sent = True
        reply = yield from self._ask(holder)
        if isinstance(reply, Refusal):
            self._is_sent = reply.reason == "busy"
            self._was_refused = True
            try:
                yield from self._stay()  # Before the pause, which may be long.
            except Outage:
                return reply  # The next request draws it.
        return reply

    def _turn(self) -> Steps[Refusal | None]:
        """Returns the refusal of a caller whose turn it is not."""
        while True:
            yield from self._stay()
            number = NONE if self._ticket is None else self._ticket
            (front,) = yield Call("front", [(self._queue, number)])
            at = position(number, front)
            if at.lapsed and at.behind is None:
                yield Call("clear", [(one,) for one in at.lapsed])
            if at.is_missing:
                self._ticket = None
            elif not at.is_unknown:
                break
        if at.behind is None:
            return None
        return Refusal(self._name, "queued", retry_after=at.behind)

    def _stay(self) -> Steps[None]:
        """Draws a ticket for a caller that has been refused and waits, or keeps it alive."""
        now = clock.now()
        if self._ticket is None:
            if self._was_refused and self._wait.until > now:
                ((self._ticket,),) = yield Call("join", [(self._queue,)], alone=True)
                self._alive = now
        elif now >= self._alive + HEARTBEAT:
            yield Call("stay", [(self._ticket,)])
            self._alive = now
