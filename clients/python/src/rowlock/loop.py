"""A thread of the library's own, which carries out the steps of the protocol over one session."""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from . import clock
from .errors import Outage
from .protocol import Call, Pause, Steps

#: How many seconds the loop pauses at most, until it reads the clock again. The pauses of threads
#: do not count the time that the machine sleeps.
LOOK = 1.0
#: How many requests a statement has at most, for each second that its reply is waited for. On
#: PostgreSQL a claim on a row that another transaction has locked takes 100 ms, or more under load.
BATCH = 4

log = logging.getLogger("rowlock")


class Session(Protocol):
    """Sends requests of one kind over a connection that is opened for the first of them."""

    #: For how many seconds it waits for a reply. It may change between two requests.
    patience: float
    #: What notifies of releases, on PostgreSQL.
    listener: Any

    def send(self, kind: str, requests: Sequence[Any]) -> list[Any]: ...
    def close(self) -> None: ...


class Task:
    """Steps that a loop carries out."""

    def __init__(
        self,
        steps: Steps[Any],
        patience: float,
        done: Callable[[Any, BaseException | None], object] = lambda *_: None,
    ) -> None:
        self.steps = steps
        self.patience = patience
        self.done = done
        #: It was not begun: its caller was told so.
        self.is_left = False
        #: In which order the tasks of the loop began.
        self.begun = 0
        #: The pause that the task is in: its number, which no other pause has.
        self.pause: int | None = None
        #: A release of one of these keys ends the pause.
        self.keys: Sequence[str] = ()


class Loop:
    """Carries out tasks on a thread, which begins with the first and ends after the last."""

    def __init__(
        self, name: str, session: Callable[[], Session] | None = None, linger: float = 0.0
    ) -> None:
        self._name = name
        self._new_session = session
        self._session: Session | None = None
        #: For how many seconds the session is kept for the next task.
        self.linger = linger
        #: The session ends with the last task, and is not kept.
        self.closes = False
        #: Held by the thread that works. One that finds it held ends at once.
        self._is_worked = threading.Lock()
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._tasks: set[Task] = set()
        self._calls: deque[tuple[Task, Call]] = deque()
        self._pauses: list[tuple[float, int, float, Task]] = []
        self._numbers = itertools.count()
        self._waiting: dict[str, deque[tuple[int, Task]]] = {}

    def run(self, task: Task) -> None:
        """Begins a task. Raises :class:`RuntimeError` if no thread can be started."""
        self._inbox.put(lambda: self._begin(task))
        # An interrupt may come before the thread starts, or before it is known to have started.
        if not self._is_worked.locked():
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except RuntimeError:
                task.is_left = True
                raise

    def wake(self, task: Task) -> None:
        """Ends the pause of a task. A finalizer and a signal handler may call it."""
        self._inbox.put(lambda: self._resume(task, task.pause))

    def released(self, keys: Sequence[str]) -> None:
        """Wakes the first task that waits for one of these keys."""
        self._inbox.put(lambda: self._released(keys))

    def close_soon(self) -> None:
        """Ends the session as soon as no task needs it, and so each that a later task opens."""
        self.closes = True
        self._inbox.put(lambda: None)

    def is_current(self) -> bool:
        """Returns whether the caller runs on the loop's thread, which waits for no task."""
        return threading.current_thread() is self._thread

    def _work(self) -> None:
        if not self._is_worked.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        try:
            self._go_on()
        except BaseException as error:  # As if a greenlet is killed.
            tasks, self._tasks = self._tasks, set()
            self._calls.clear()
            self._pauses.clear()
            self._waiting.clear()
            self._is_worked.release()
            for task in tasks:
                reason = RuntimeError(f"the thread {self._name!r} has ended: {error!r}")
                self._carefully(functools.partial(task.done, None, reason))
            raise

    def _go_on(self) -> None:
        idle_until = clock.now() + self.linger
        while True:
            try:
                message = self._inbox.get(timeout=self._time_left(idle_until))
                while True:
                    self._carefully(message)
                    message = self._inbox.get_nowait()
            except queue.Empty:
                pass
            self._end_pauses()
            self._send_some()
            if self._tasks:
                idle_until = clock.now() + self.linger
            elif (clock.now() >= idle_until or self.closes) and self._end():
                return

    def _time_left(self, idle_until: float) -> float:
        if self._calls:
            return 0.0
        if not self._tasks:
            return 0.0 if self.closes else max(0.0, idle_until - clock.now())
        left = self._pauses[0][0] - clock.now() if self._pauses else LOOK
        return max(0.0, min(left, LOOK))

    def _end(self) -> bool:
        """Ends the thread, unless a task has come."""
        session, self._session, self._thread = self._session, None, None
        self._is_worked.release()
        # A task that came before the release has started no thread. One that comes after it has.
        if not self._inbox.empty() and self._is_worked.acquire(blocking=False):
            self._session, self._thread = session, threading.current_thread()
            return False
        if session is not None:
            session.close()
        return True

    def _carefully(self, work: Callable[[], object]) -> None:
        """Nothing ends the thread: the leases of the process depend on it."""
        try:
            work()
        except Exception:
            log.exception("a request of rowlock failed in a way that is not known")

    def _begin(self, task: Task) -> None:
        if task.is_left:
            return
        self._tasks.add(task)
        task.begun = next(self._numbers)
        self._advance(task, lambda: next(task.steps))

    def _resume(self, task: Task, pause: int | None) -> bool:
        """Goes on with a task if it is still in this pause."""
        if pause is None or task.pause != pause:
            return False
        task.pause = None
        for key in task.keys:
            waiting = self._waiting.get(key, deque())
            if (pause, task) in waiting:
                waiting.remove((pause, task))
            if not waiting:
                self._waiting.pop(key, None)
        self._advance(task, lambda: next(task.steps))
        return True

    def _advance(self, task: Task, to_next: Callable[[], Call | Pause]) -> None:
        try:
            step = to_next()
        except StopIteration as end:
            result = end.value
            self._tasks.discard(task)
            self._carefully(lambda: task.done(result, None))
        except BaseException as error:
            failure = error
            self._tasks.discard(task)
            self._carefully(lambda: task.done(None, failure))
        else:
            if isinstance(step, Call):
                self._calls.append((task, step))
            else:
                self._pause(task, step)

    def _pause(self, task: Task, step: Pause) -> None:
        number = next(self._numbers)
        task.pause = number
        due = clock.now() + max(0.0, step.seconds)
        heapq.heappush(self._pauses, (due, number, step.early, task))
        task.keys = step.keys
        for key in step.keys:
            self._waiting.setdefault(key, deque()).append((number, task))

    def _released(self, keys: Sequence[str]) -> None:
        for key in keys:
            if waiting := self._waiting.get(key):
                # The one that began first: of fair ones, it has the first ticket.
                number, task = min(waiting, key=lambda one: one[1].begun)
                self._resume(task, number)

    def _end_pauses(self) -> None:
        """Ends the pauses that are over, and with them those that may end early."""
        now = clock.now()
        if not self._pauses or self._pauses[0][0] > now:
            return
        due = [pause for pause in self._pauses if pause[0] - pause[2] <= now]
        self._pauses = [one for one in self._pauses if one[0] - one[2] > now]
        self._pauses = [one for one in self._pauses if one[3].pause == one[1]]
        heapq.heapify(self._pauses)
        for _, number, _, task in sorted(due, key=lambda one: one[:2]):
            self._resume(task, number)

    def _send_some(self) -> None:
        """Sends what waits: those of each kind together, and then one that travels alone."""
        # Renewals go first: one that is sent after the abandon of its claim would undo it.
        groups: dict[str, list[tuple[Task, Call]]] = {"renew": []}
        alone: deque[tuple[Task, Call]] = deque()
        for task, call in self._calls:
            if call.alone:
                alone.append((task, call))
            else:
                groups.setdefault(call.kind, []).append((task, call))
        self._calls.clear()
        for kind, calls in groups.items():
            while calls:
                count, size, most = 0, 0, BATCH * self._patience()
                while count < len(calls) and (not count or size < most):
                    size += len(calls[count][1].requests)
                    count += 1
                self._send(kind, calls[:count])
                del calls[:count]
        if alone:
            self._send(alone[0][1].kind, [alone.popleft()])
        self._calls.extend(alone)

    def _send(self, kind: str, calls: list[tuple[Task, Call]]) -> None:
        requests = [request for _, call in calls for request in call.requests]
        try:
            replies = iter(self._usable_session().send(kind, requests))
        except Exception as error:
            if len(calls) == 1 or isinstance(error, Outage):
                for task, _ in calls:
                    self._advance(task, functools.partial(task.steps.throw, _same(error)))
                return
            # It may concern one of the requests. Each may be sent again.
            for one in calls:
                self._send(kind, [one])
            return
        for task, call in calls:
            own = list(itertools.islice(replies, len(call.requests)))
            self._advance(task, functools.partial(task.steps.send, own))

    def _usable_session(self) -> Session:
        if self._session is None:
            assert self._new_session is not None
            self._session = self._new_session()
        self._session.patience = self._patience()
        return self._session

    def _patience(self) -> float:
        """Returns that of the shortest lease: a request that waits holds up those of others."""
        return min(task.patience for task in self._tasks)


def _same(error: Exception) -> Exception:
    """Returns an exception of its own for each task that is told."""
    if not isinstance(error, Outage):
        return error
    copy = Outage(error.sent, error.permanent)
    copy.__cause__ = error.__cause__
    return copy
