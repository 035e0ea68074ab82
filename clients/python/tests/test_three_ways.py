"""Programs in Rust, workers in Python and sessions of psql (or mysql) on the same rows."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from clients import Ended, Session
from conftest import SERVERS, Database, program
from counter import KEYS, TABLES
from test_processes import WORKER, line
from worker import raise_counter

WAYS = ("rust", "python", "sql")
LEASE = 2.0
PATIENCE = 240.0


class Victim(Protocol):
    """Holds a key, has read its number, and writes the next one when it is told to."""

    token: int

    def signal(self, number: int) -> None: ...
    def writes(self) -> str: ...
    def close(self) -> None: ...


class Worker:
    """A process of `worker.py`, by itself or as the command of `rowlock run`."""

    def __init__(self, db: Database, way: str, key: str) -> None:
        # The crowd asks too, in no order: the wait may be long.
        command = [sys.executable, WORKER, "hesitate", db.url, db.name, key, str(LEASE)]
        if way == "rust":
            command = [program(), "run", key, "--wait", "600s", "--lease", f"{LEASE}s"]
            command += ["--", sys.executable, WORKER, "hesitate_run", db.url, db.name]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=db.environment(), text=True
        )
        said = line(self.process)
        assert said[:1] == ["held"], said or self.process.communicate(timeout=60)[1]
        token = said[1]
        self.token = int(token)

    def signal(self, number: int) -> None:
        """Where the program runs it, its command is not paused: it knows of no loss."""
        self.process.send_signal(number)

    def writes(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("now\n")
        self.process.stdin.flush()
        return " ".join(line(self.process))

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode != 0, "its claim was taken over, and it was told"


class Psql:
    def __init__(self, db: Database, key: str) -> None:
        self._session = Session(db)
        self._claim = self._session.acquire(key, LEASE)
        self._number = self._session.read(key)
        self.token = self._claim.token

    def signal(self, number: int) -> None:
        self._session.process.send_signal(number)

    def writes(self) -> str:
        try:
            self._session.write(self._claim, self._number + 1)
        except Ended as error:
            return "refused" if "is lost" in str(error) else f"failed: {error}"
        return "written"

    def close(self) -> None:
        self._session.close()


class Crowd:
    """Two of each way, which raise the counters of both keys until the end of the block."""

    def __init__(self, db: Database, folder: Path) -> None:
        self._db = db
        self._folder = folder
        self._failures: list[BaseException] = []
        works = (self._rust, self._python, self._sql) * 2
        self._threads = [threading.Thread(target=self._kept, args=(work,)) for work in works]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / "stop").touch()
        for thread in self._threads:
            thread.join()
        self.check()

    def check(self) -> None:
        """Raises what has ended one of them."""
        if self._failures:
            raise self._failures[0]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            self.check()
            assert time.monotonic() < end, f"not within {PATIENCE} s: {what}"
            time.sleep(0.05)

    def _kept(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failures.append(error)

    def _goes_on(self) -> bool:
        return not (self._folder / "stop").exists()

    def _rust(self) -> None:
        turn = 0
        while self._goes_on():
            turn += 1
            key = KEYS[turn % len(KEYS)]
            command = (sys.executable, WORKER, "run", self._db.url, self._db.name, self._folder)
            arguments = ("run", key, "--wait", "120s", "--lease", "20s", "--", *map(str, command))
            done = self._db.run(*arguments)
            assert done.returncode == 0, done.stdout + done.stderr

    def _python(self) -> None:
        command = (sys.executable, WORKER, "contend", self._db.url, self._db.name, self._folder)
        subprocess.run(list(map(str, command)), check=True)

    def _sql(self) -> None:
        session = Session(self._db)
        turn = 0
        while self._goes_on():
            turn += 1
            claim = session.acquire(KEYS[turn % len(KEYS)], 20)
            raise_counter(self._folder / claim.key, claim.token)
            session.write(claim, session.read(claim.key) + 1)
            assert session.release(claim) == "done"
            time.sleep(0.02)
        session.close()


def written(db: Database, key: str) -> list[tuple[Any, ...]]:
    """The writes of a key in the order of their numbers: number, token, who."""
    rows: list[tuple[Any, ...]] = db.execute(
        f"SELECT n, token, who FROM written WHERE name = '{key}' ORDER BY n, token"
    )
    return rows


def ways(db: Database) -> list[set[str]]:
    """For each key, the ways in which it was held for a write."""
    return [{who for _, _, who in written(db, key)} for key in KEYS]


def disturb(db: Database, crowd: Crowd, way: str, key: str, fate: signal.Signals) -> None:
    """Kills one that holds a key, or pauses it until another holder has written."""

    def taken_over() -> bool:
        return bool(written(db, key)[-1][1] > victim.token)

    victim: Victim = Psql(db, key) if way == "sql" else Worker(db, way, key)
    try:
        victim.signal(fate)
        crowd.until(taken_over, f"{key}, held by {way}, is taken over")
        if fate == signal.SIGSTOP:
            if way == "rust":  # Its command is told before the program knows of the loss.
                assert victim.writes() == "refused"
            victim.signal(signal.SIGCONT)
            if way != "rust":
                assert victim.writes() == "refused"
    except BaseException:
        victim.signal(signal.SIGKILL)
        raise
    finally:
        victim.close()
    assert victim.token not in [token for _, token, _ in written(db, key)]


@SERVERS
def test_three_ways_exclude_each_other(db: Database, tmp_path: Path) -> None:
    client = "psql" if db.name == "postgres" else "mysql"
    if not shutil.which(client):
        pytest.skip(f"there is no program {client}")
    for statement in TABLES:
        db.execute(statement)
    for key in KEYS:
        (tmp_path / key).write_text("0\n")
    with Crowd(db, tmp_path) as crowd:
        crowd.until(lambda: all(ways(db)), "a write under each key")
        for way in WAYS:
            disturb(db, crowd, way, "a", signal.SIGKILL)
            disturb(db, crowd, way, "b", signal.SIGSTOP)
        crowd.until(lambda: ways(db) == [set(WAYS)] * len(KEYS), "a write of each way")
    for key in KEYS:
        rows = written(db, key)
        # Exact: each number was written once, and higher numbers under higher tokens.
        assert [row[0] for row in rows] == list(range(1, len(rows) + 1))
        tokens = [row[1] for row in rows]
        assert tokens == sorted(set(tokens))
        assert db.execute(f"SELECT n FROM counter WHERE name = '{key}'")[0][0] == len(rows)
        # The counter in a file has no confirmation: the claims alone have kept it exact.
        assert int((tmp_path / key).read_text()) == len(rows)
        kept = (tmp_path / f"{key}.tokens").read_text().split()
        assert list(map(int, kept)) == tokens
