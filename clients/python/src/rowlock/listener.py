"""Notifications of releases elsewhere, on PostgreSQL: a connection that is open while tasks wait.

A notification is a hint. No waiter relies on it: each also polls.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from . import clock
from .deadlines import answer

#: For how many seconds the connection is kept for the next waiter.
LINGER = 5.0
#: After how many seconds without a notification the connection is asked whether it still answers.
CHECK = 30.0
#: For how many seconds no connection is opened after one that failed.
PAUSE = 30.0

log = logging.getLogger("rowlock")


class Listener:
    """Listens on a thread of its own, from the first waiter until a moment after the last."""

    def __init__(
        self, connect: Callable[[], Any] | None, released: Callable[[str], object]
    ) -> None:
        #: Opens a connection, or returns none behind a pooler that shares sessions.
        self._connect = connect
        self._released = released
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._needed_until = 0.0
        self._not_before = 0.0
        #: Notifications are received.
        self.is_open = False

    def need(self) -> bool:
        """Returns whether notifications are received. If not, they may be soon."""
        with self._mutex:
            now = clock.now()
            self._needed_until = now + LINGER
            is_due = self._connect is not None and now >= self._not_before
            if self._thread is None and is_due:
                thread = threading.Thread(target=self._work, name="rowlock listener", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # There are too many threads: the waiters poll.
                    return False
                self._thread = thread
        return self.is_open

    def close(self) -> None:
        """Ends the connection within a second."""
        self._needed_until = 0.0

    def _work(self) -> None:
        assert self._connect is not None
        try:
            connection = self._connect()
            if connection is None:
                self._connect = None  # Now and later.
                return
            with contextlib.closing(connection):  # Nothing is committed, nor waited for.
                self._listen(connection)
        except Exception as error:
            self._not_before = clock.now() + PAUSE
            log.debug("no notifications of releases for a while: %s", error)
        finally:
            self.is_open = False
            with self._mutex:
                self._thread = None

    def _listen(self, connection: Any) -> None:
        answer(connection, "LISTEN rowlock")
        self.is_open = True
        heard = time.monotonic()
        while clock.now() < self._needed_until:
            for notification in connection.notifies(timeout=1.0):
                self._released(notification.payload)
                heard = time.monotonic()
            if time.monotonic() - heard > CHECK:
                answer(connection, "SELECT 1")
                heard = time.monotonic()
