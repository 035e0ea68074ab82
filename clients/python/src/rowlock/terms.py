"""What is asked for: a key, and under which terms."""

from __future__ import annotations

import math
import os
import socket
import unicodedata
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

#: A duration: a number of seconds, or a ``timedelta``.
Seconds = float | timedelta
#: Which rules a claim follows.
Rules = Literal["recover", "article"]

#: How many characters of a label the column holds.
LABEL = 45
DAY = 86400.0


@dataclass(frozen=True)
class Terms:
    """What is asked for. Durations are in seconds."""

    key: str
    lease: float = 30.0
    min_interval: float = 0.0
    rules: Rules = "recover"
    label: str = ""
    #: Those that are fair are granted the key in the order in which they began to wait.
    fair: bool = False

    def __post_init__(self) -> None:
        check_key(self.key)
        if not 0.1 <= self.lease <= 30 * DAY:
            raise ValueError(f"lease {self.lease} is not valid: it has to be from 0.1 s to 30 days")
        if not 0 <= self.min_interval <= 3653 * DAY:
            raise ValueError(
                f"min_interval {self.min_interval} is not valid: "
                "it has to be from zero to ten years"
            )
        if self.rules not in ("recover", "article"):
            raise ValueError(f"rules {self.rules!r} are not known: they are recover or article")
        if not isinstance(self.label, str):
            raise TypeError(f"label {self.label!r} is not valid: it has to be a str")
        if len(self.label) > LABEL or any(
            unicodedata.category(one) in ("Cc", "Cs") for one in self.label
        ):
            raise ValueError(
                f"label {self.label[:80]!r} is not valid: "
                f"it has to have at most {LABEL} characters, and no control characters"
            )


def check_key(key: object) -> None:
    """Raises :class:`TypeError` for what is no text, :class:`ValueError` for what is no key."""
    if not isinstance(key, str):
        raise TypeError(f"key {key!r} is not valid: it has to be a str")
    if (
        not 1 <= len(key.encode(errors="surrogatepass")) <= 255
        or any("\ud800" <= one <= "\udfff" or one == "\0" for one in key)
        or is_space(key[0])
        or is_space(key[-1])
    ):
        raise ValueError(
            f"key {key[:80]!r} is not valid: "
            "use 1 to 255 bytes of UTF-8, without NUL and without white space at the ends"
        )


def seconds(name: str, value: object) -> float:
    """Returns a duration in seconds. Raises :class:`ValueError` for a negative or endless one."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(
            f"{name} {value!r} is not valid: it has to be a finite number of seconds, "
            "or a timedelta"
        )
    if value < 0:
        raise ValueError(f"{name} {value!r} is not valid: it has to be zero or more")
    return float(value)


def seconds_or_none(name: str, value: object) -> float | None:
    """Returns a duration in seconds, or none, which stands for a wait without an end."""
    return None if value is None else seconds(name, value)


def is_space(character: str) -> bool:
    """Returns whether the database and the other clients count a character as white space."""
    return character.isspace() and character not in "\x1c\x1d\x1e\x1f"


def default_label() -> str:
    """Returns the host's name and the number of the process, as the other clients write it."""
    process = f"/{os.getpid()}"
    host = "".join(one for one in socket.gethostname() if unicodedata.category(one) != "Cc")
    return host[max(0, len(host) + len(process) - LABEL) :] + process
