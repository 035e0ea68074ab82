"""A database that answers as a test says, and leases on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rowlock import Claim, Lease, clock
from rowlock.database import Database
from rowlock.kinds import One
from rowlock.loop import Session
from rowlock.protocol import (
    Acquired,
    Call,
    Granted,
    Pause,
    State,
    Steps,
    Wait,
)
from rowlock.sources import Place
from rowlock.steps import Pauses
from rowlock.terms import Terms

T = TypeVar("T")


class Fake:
    """A session that answers each request as the test says: a value, or an exception to raise."""

    patience = 0.0
    listener: Any = None

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, Any]] = []

    def send(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        return [self._answered(kind, request) for request in requests]

    def _answered(self, kind: str, request: Any) -> Any:
        if kind == "open":
            return None
        self.requests.append((kind, request))
        answer = self.answer(kind, request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        pass


def granted(request: Any) -> Granted:
    """The reply that grants a claim."""
    terms, holder = request
    return Granted(Claim(terms.key, holder, 7), None)


def state(lease: float = 30.0, sent: float | None = None) -> State:
    return State((Claim("k", "h", 7),), lease, clock.now() if sent is None else sent)


def database(fake: Fake) -> Database:
    """Two loops over the fake. Each thread ends after its last task."""
    return Database(Place(object(), lambda: fake, is_shared=False))


@contextmanager
def together(on: Database) -> Generator[None, None, None]:
    """What the block asks for is sent at once, at its end."""
    ended = threading.Event()
    on.requests._inbox.put(lambda: ended.wait(60))
    yield
    ended.set()


def hold(fake: Fake, state: State) -> Lease:
    """A lease that is renewed."""
    on = database(fake)
    on._hold(state)
    state.delivered = True
    return Lease(on, Acquired(state, None))


def is_renewed(on: Database) -> bool:
    """Whether a thread renews anything."""
    return on.renewals._thread is not None


def acquiring(terms: Terms, wait: float = 0.0) -> Steps[Any]:
    """The steps that claim a key."""
    until = Wait(clock.now() + wait)
    return One(terms).acquiring(until, lambda: Pauses(0.02, 1.0), lambda _: None)


def carry_out(steps: Steps[T], on: Session, pause: Callable[[float], Any] = time.sleep) -> T:
    """Carries steps out. Ends them early if ``pause`` returns true."""
    try:
        step: Call | Pause = next(steps)
        while True:
            if isinstance(step, Pause):
                if pause(step.seconds):
                    steps.close()
                step = next(steps)
                continue
            try:
                replies = on.send(step.kind, step.requests)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(replies)
    except StopIteration as end:
        value: T = end.value
        return value
