"""Locks in the SQL database that an application already has.

    import rowlock

    with rowlock.lock("postgres://app@db/app", "report", lease=30, wait=10) as lease:
        write_report(fencing_token=lease.token)

A claim is a lease: a thread renews it while the block runs, and after a crash another process takes
over when the lease ends. ``rowlock.aio`` is the same for psycopg's asynchronous connections.
"""

from .errors import Error, Lost, NotInstalled, Refusal, Refused, Unavailable, Unknown
from .lease import Lease, Lock, job, lock, try_acquire
from .protocol import Claim, Previous

__all__ = [
    "Claim",
    "Error",
    "Lease",
    "Lock",
    "Lost",
    "NotInstalled",
    "Previous",
    "Refusal",
    "Refused",
    "Unavailable",
    "Unknown",
    "job",
    "lock",
    "try_acquire",
]
