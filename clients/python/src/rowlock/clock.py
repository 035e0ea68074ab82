"""The clock of leases. It counts the time that the machine sleeps, as the database's clock does.

``time.monotonic()`` stands still during a suspension on Linux and on macOS. On Windows it counts
it: ``GetTickCount64`` and ``QueryPerformanceCounter``, on which it rests, are documented to.
Limits to how long a reply is waited for stay on ``time.monotonic()``: no reply comes in a sleep.
"""

from __future__ import annotations

import sys
import time


def counting_sleep(platform: str) -> int | None:
    """Returns the clock of a platform that counts suspended time, or none if it has no other."""
    # CLOCK_MONOTONIC of macOS counts it too, but follows corrections of the wall clock.
    names = {"linux": "CLOCK_BOOTTIME", "darwin": "CLOCK_MONOTONIC_RAW"}
    found: int | None = getattr(time, names.get(platform, ""), None)
    return found


_CLOCK = counting_sleep(sys.platform)


def now() -> float:
    """Returns the seconds since a moment in the past, those of suspensions included."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
