"""What a thread of the library delivers to its caller."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Result(Generic[T]):
    """A result that is delivered once. Nothing that a caller holds delays the delivery.

    ``concurrent.futures.Future`` has a lock that a waiting caller takes. A signal handler that
    interrupts it there, and waits for another result, would stop the thread that delivers both.
    """

    def __init__(self) -> None:
        # ``put`` takes no lock that ``get`` may have left taken.
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_done = False
        self._callbacks: list[Callable[[], object]] = []

    def deliver(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error = value, error
        self._is_done = True
        self._told.put(None)
        for callback in tuple(self._callbacks):
            callback()

    def done(self) -> bool:
        return self._is_done

    def when_done(self, callback: Callable[[], object]) -> None:
        """Calls back on the delivery, or now. It may do both."""
        self._callbacks.append(callback)
        if self._is_done:
            callback()

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result, and returns or raises it."""
        try:
            self._told.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"there is no result within {timeout} s") from None
        self._told.put(None)  # For others that wait.
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value
