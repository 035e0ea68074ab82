"""A limit to how long a request to PostgreSQL waits for its reply.

libpq has no read timeout, and psycopg, when it is interrupted, sends a cancellation and waits for
the reply to that. A server or a proxy that is silent would hold up a lease's requests past its end.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg
    from typing_extensions import LiteralString

#: Needs no file descriptor, of which the process may have none left, as that of epoll does.
SELECTOR = getattr(selectors, "PollSelector", selectors.SelectSelector)


def prepare(connection: psycopg.Connection[Any], seconds: float) -> None:
    """Makes a connection one for leases: it commits each statement, and its waits have a limit."""
    limit(connection, seconds)
    connection.commit()  # What opened it may have begun a transaction.
    connection.autocommit = True
    # PgBouncer in transaction mode changes the server between two executions.
    connection.prepare_threshold = None


def limit(connection: psycopg.Connection[Any], seconds: float) -> None:
    """Limits each wait of a connection."""
    socket = connection.pgconn.socket

    def wait(steps: Generator[Any, Any, Any], *_: Any, **__: Any) -> Any:
        return _waited(steps, socket, seconds)

    connection.wait = wait  # type: ignore[method-assign, assignment]


def answer(connection: psycopg.Connection[Any], sql: LiteralString) -> psycopg.Cursor[Any]:
    """Executes a statement on a connection that listens. It is answered within five seconds."""
    limit(connection, 5.0)
    cursor = connection.execute(sql)
    del connection.wait  # Which hides the method of the class.
    return cursor


def _waited(steps: Generator[Any, Any, Any], socket: int, seconds: float) -> Any:
    """Carries out what psycopg wants of the socket. Its flags are those of ``selectors``."""
    until = time.monotonic() + seconds
    try:
        wanted = next(steps)
        with SELECTOR() as selector:
            selector.register(socket, wanted)
            while True:
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"no reply in {seconds:.1f} s")
                wanted = steps.send(ready[0][1])
                selector.modify(socket, wanted)
    except StopIteration as end:
        return end.value
