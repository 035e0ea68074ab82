"""Errors, and the refusal that is no error."""

from __future__ import annotations

import logging
import sys
import unicodedata
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Refusal:
    """A regular result: the key cannot be claimed now. It is false, and a lease is true."""

    key: str
    #: ``held``, ``held_by_another_program``, ``timed_out_unfinished``, ``within_min_interval``,
    #: ``last_run_failed``, ``not_succeeded``, ``busy`` or ``queued``. These names do not change.
    reason: str
    #: The label of the last claim.
    by: str | None = None
    #: When that claim was made, on the database's clock.
    since: datetime | None = None
    #: When the lease or the minimum interval ends, on the database's clock.
    until: datetime | None = None
    #: In how many seconds a new request is useful.
    retry_after: float | None = None

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        text = f"{printable(self.key)}: {self.reason.replace('_', ' ')}"
        if self.by:
            text += f", by {printable(self.by)}"
        if self.until:
            text += f", until {self.until:%Y-%m-%d %H:%M:%S %Z}"
        return text

    def __json__(self) -> dict[str, Any]:
        """The form in which Celery returns it."""
        plain = asdict(self)
        times = {name: getattr(self, name) for name in ("since", "until")}
        return plain | {name: time and time.isoformat() for name, time in times.items()}


def printable(text: str) -> str:
    """Returns a text on one line: control characters and the like are escaped."""

    def shown(one: str) -> str:
        is_other = unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp", "Cs")
        return one.encode("unicode_escape").decode() if is_other else one

    return "".join(map(shown, text))


def from_micros(micros: int | None) -> datetime | None:
    """Returns the time that is so many microseconds after 1970, or none if Python has no such."""
    try:
        return None if micros is None else EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        return None


class Error(Exception):
    """An error of this package."""


class Refused(Error):
    """The key cannot be claimed now; ``refusal`` states why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"refused: {refusal}")
        self.refusal = refusal

    def __reduce__(self) -> Any:  # As it passes from a process to another.
        return type(self), (self.refusal,), self.__dict__


class Lost(Error):
    """The claim does not stand: its lease ended, or the key was freed or taken over."""

    def __init__(self, key: str, token: int, why: str) -> None:
        super().__init__(f"the claim on key {key!r} under token {token} is lost: {why}")
        self.key = key
        self.token = token
        self.why = why

    def __reduce__(self) -> Any:
        return type(self), (self.key, self.token, self.why), self.__dict__


class Unavailable(Error):
    """The database could not be used. Nothing was changed."""

    #: Another try would fail in the same way.
    permanent = False


class Unknown(Error):
    """A request has no reply. It may have been carried out; its effect ends with the lease."""


class NotInstalled(Error):
    """The table or the functions are missing or too old: run ``rowlock migrate --functions``."""


class Outage(Exception):
    """No connection (``sent`` is false), or one that was lost with a request in flight.

    It is permanent if another try would fail too: a wrong password, a missing driver or file.
    """

    def __init__(self, sent: bool, permanent: bool = False) -> None:
        super().__init__("there was no reply" if sent else "there was no connection")
        self.sent = sent
        self.permanent = permanent


class Contention(Exception):
    """The statement was undone, and may be sent again: another transaction used the row."""


class Overload(Contention):
    """The statement was undone: the server lacked the time, the space or the memory for it."""


def note(error: BaseException, problem: Exception) -> None:
    """Adds a problem of the block's end to the exception that ended the block.

    One that closes a generator is not shown.
    """
    if sys.version_info >= (3, 11) and not isinstance(error, GeneratorExit):
        error.add_note(f"rowlock: {problem}")
    else:
        logging.getLogger("rowlock").error("%s", problem)
