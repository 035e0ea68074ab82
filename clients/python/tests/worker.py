"""A process that holds keys, as the tests start it: worker.py COMMAND URL ARGUMENT..."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import Database
from counter import KEYS, read, write, writes

import rowlock
from rowlock import database, mysql, postgres


def hold(url: str, key: str, lease: str) -> None:
    """Holds a key until it is lost, and says so at once."""
    with rowlock.lock(url, key, lease=float(lease), label="python") as held:
        print("held", held.token, flush=True)
        while not held.lost:
            time.sleep(0.005)
        print("lost", time.monotonic(), flush=True)


def count(url: str, folder: str, rounds: str) -> None:
    """Raises a counter by hand under one of two keys, and writes the tokens down."""
    for _ in range(int(rounds)):
        key = random.choice(["a", "b"])
        with rowlock.lock(url, key, wait=120, lease=20) as held:
            raise_counter(Path(folder) / key, held.token)


def raise_counter(file: Path, token: int) -> None:
    text = file.read_text()
    time.sleep(random.uniform(0, 0.005))
    file.write_text(str(int(text) + 1))
    with file.with_suffix(".tokens").open("a") as tokens:
        tokens.write(f"{token}\n")


def contend(url: str, name: str, folder: str) -> None:
    """Raises both counters of one of the keys, until there is a file `stop`."""
    connection = Database(name, url).connect()
    while not (Path(folder) / "stop").exists():
        key = random.choice(KEYS)
        with rowlock.lock(url, key, wait=120, lease=20, label="python") as held:
            raise_counter(Path(folder) / key, held.token)
            number = read(connection, key)
            write(connection, held.confirm, writes(key, held.token, number + 1, "python"))


def run(url: str, name: str, folder: str) -> None:
    """Does the same once, as the command of `rowlock run`."""
    key, token, confirm = claim_of_program(name)
    connection = Database(name, url).connect()
    raise_counter(Path(folder) / key, token)
    number = read(connection, key)
    write(connection, confirm, writes(key, token, number + 1, "rust"))


def hesitate(url: str, name: str, key: str, lease: str) -> None:
    """Reads a number under the claim, and writes the next one when it is told to."""
    with rowlock.lock(url, key, wait=600, lease=float(lease), label="python") as held:
        write_when_told(url, name, key, held.token, held.confirm, "python")


def hesitate_run(url: str, name: str) -> None:
    """Does the same, as the command of `rowlock run`."""
    key, token, confirm = claim_of_program(name)
    write_when_told(url, name, key, token, confirm, "rust")


def interrupt(url: str, key: str, lease: str, rounds: str) -> None:
    """Is interrupted at random times, and says how often, and how many threads are left."""

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    database.LINGER = 1.0
    signal.signal(signal.SIGALRM, handler)
    with rowlock.lock(url, key):
        pass  # The driver is imported.
    interrupts = 0
    for _ in range(int(rounds)):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.08))
            until = time.monotonic() + 1  # An interrupt in a finalizer is ignored.
            try:
                while time.monotonic() < until:
                    with rowlock.lock(url, key, lease=float(lease), wait=30):
                        pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupts += 1
    gc.collect()
    end = time.monotonic() + 20
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.05)
    print(interrupts, threading.active_count() - 1)


def claim_of_program(name: str) -> tuple[str, int, Callable[[Any], None]]:
    """The claim under which `rowlock run` has started this process, and its confirmation."""
    key, holder = os.environ["ROWLOCK_KEY"], os.environ["ROWLOCK_HOLDER"]
    token = int(os.environ["ROWLOCK_TOKEN"])
    statement = postgres.CONFIRM if name == "postgres" else mysql.CONFIRM

    def confirm(cursor: Any) -> None:
        cursor.execute(statement, (key, holder, token))

    return key, token, confirm


def write_when_told(
    url: str, name: str, key: str, token: int, confirm: Callable[[Any], None], who: str
) -> None:
    connection = Database(name, url).connect()
    number = read(connection, key)
    print("held", token, flush=True)
    sys.stdin.readline()
    try:
        write(connection, confirm, writes(key, token, number + 1, who))
    except Exception as error:
        print("refused" if "is lost" in str(error) else f"failed: {error}", flush=True)
    else:
        print("written", flush=True)


if __name__ == "__main__":
    commands = (hold, count, contend, run, hesitate, hesitate_run, interrupt)
    {one.__name__: one for one in commands}[sys.argv[1]](*sys.argv[2:])
