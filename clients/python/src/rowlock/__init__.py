"""Locks in the SQL database that an application already has.

    import rowlock

    locks = rowlock.connect("postgres://app@db/app")
    with locks.lock("report", wait=10) as lease:
        write_report(fencing_token=lease.token)

A claim is a lease: a thread of the library renews it while the block runs, and after a crash
another process takes over when the lease ends. ``rowlock.aio`` is the same for event loops.
"""

from .errors import Error, Lost, NotInstalled, Refusal, Refused, Unavailable, Unknown
from .lease import Lease
from .lock import Lock, Locks, ReadWrite, connect, job, lock, try_acquire
from .protocol import Claim, Previous
from .sources import Source
from .terms import Rules, Seconds

__all__ = [
    "Claim",
    "Error",
    "Lease",
    "Lock",
    "Locks",
    "Lost",
    "NotInstalled",
    "Previous",
    "ReadWrite",
    "Refusal",
    "Refused",
    "Rules",
    "Seconds",
    "Source",
    "Unavailable",
    "Unknown",
    "connect",
    "job",
    "lock",
    "try_acquire",
]
