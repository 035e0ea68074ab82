"""Several keys, permits, readers, writers and leaders of Python and of the program `rowlock`."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from conftest import Database, acquired, eventually, refused

import rowlock
import rowlock.aio

#: As scripts see it: the program was refused its key.
REFUSED = 75


@contextmanager
def running(db: Database, *arguments: str) -> Generator[subprocess.Popen[str], None, None]:
    """The program holds what it is told to hold until the block ends."""
    command = ["sh", "-c", "echo in; read -r _"]
    pipe = subprocess.PIPE
    process = db.start(*arguments, "--", *command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "in\n"
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(60)


def code(db: Database, *arguments: str) -> int:
    return db.run(*arguments, "--", "true").returncode


def test_readers_and_writers_of_both_exclude_each_other(db: Database) -> None:
    name = rowlock.connect(db.url, label="python").read_write("k")
    with name.read():
        assert code(db, "run", "k", "--shared") == 0
        assert code(db, "run", "k", "--exclusive") == REFUSED
    with name.write() as writer:
        assert code(db, "run", "k", "--shared") == REFUSED
        assert code(db, "run", "k", "--exclusive") == REFUSED
    with running(db, "run", "k", "--shared"):
        reader = acquired(name.read().acquire())
        assert reader.writer_token is not None
        assert reader.writer_token >= writer.token
        reader.release()
        assert refused(name.write().try_acquire()).reason == "held"
    with running(db, "run", "k", "--exclusive"):
        assert refused(name.read().try_acquire()).key == "k"
        assert refused(name.write().try_acquire()).key == "k"
    with name.write() as later:
        assert later.token > writer.token


def test_a_writer_waits_for_the_readers_of_the_program_and_keeps_new_ones_out(
    db: Database,
) -> None:
    name = rowlock.connect(db.url).read_write("k", wait=60)
    got: list[rowlock.Lease | rowlock.Refusal] = []
    waiter = threading.Thread(target=lambda: got.append(name.write().acquire()))
    with running(db, "run", "k", "--shared"):
        waiter.start()
        eventually(lambda: name.read().locked())
        assert code(db, "run", "k", "--shared") == REFUSED
        assert got == []
    waiter.join(60)
    acquired(got[0]).release()
    assert code(db, "run", "k", "--shared") == 0


def test_an_expired_reader_of_the_program_is_replaced(db: Database) -> None:
    name = rowlock.connect(db.url).read_write("k", wait=60)
    with running(db, "run", "k", "--shared", "--lease", "2s") as reader:
        reader.kill()
        with name.write() as writer:
            assert not writer.lost
    assert db.show("k")["status"] == "S"


def test_permits_of_both_are_the_same(db: Database) -> None:
    pool = rowlock.connect(db.url).semaphore("pool", 2)
    with running(db, "run", "pool", "--permits", "2"):
        held = acquired(pool.acquire())
        assert held.key in ("pool#1", "pool#2")
        assert pool.locked()
        assert refused(pool.try_acquire()).reason == "held"
        assert code(db, "run", "pool", "--permits", "2") == REFUSED
        held.release()
        assert code(db, "run", "pool", "--permits", "2") == 0
    assert not pool.locked()


def test_sets_of_both_exclude_each_other(db: Database) -> None:
    locks = rowlock.connect(db.url)
    keys = ["b", "a"]
    both = locks.lock_all(keys)
    keys.clear()  # The lock has its own.
    with both as lease:
        assert [claim.key for claim in lease.claims] == ["a", "b"]
        assert len({claim.holder for claim in lease.claims}) == 1
        assert code(db, "run", "b", "--also", "c") == REFUSED
        assert code(db, "run", "c") == 0
    with running(db, "run", "c", "--also", "a"):
        assert refused(locks.lock_all(["b", "a"]).try_acquire()).key == "a"
        # None of a set that is refused is held.
        assert not locks.lock("b").locked()
        assert code(db, "run", "b") == 0


def test_a_set_of_which_one_key_is_lost_is_lost(db: Database) -> None:
    lease = acquired(rowlock.connect(db.url).lock_all(["a", "b", "c"], lease=30).acquire())
    assert db.run("release", "b", "--force").returncode == 0
    eventually(lambda: lease.lost)
    # The work may go on until it is told. The others are closed to others by then.
    assert db.show("a")["state"] == db.show("c")["state"] == "held"
    with pytest.raises(rowlock.Lost):
        lease.release()
    # The others are abandoned: they do not wait for the end of their lease, 30 s later.
    eventually(lambda: db.show("a")["state"] in ("expired", "free"), 15)
    eventually(lambda: db.show("c")["state"] in ("expired", "free"), 15)


def test_a_set_of_a_task_of_which_one_key_is_lost_is_lost(db: Database) -> None:
    async def work() -> None:
        async with rowlock.aio.connect(db.url).lock_all(["a", "b"], lease=30):
            assert db.run("release", "b", "--force").returncode == 0
            await asyncio.sleep(60)

    with pytest.raises(rowlock.Lost):
        asyncio.run(work())
    eventually(lambda: db.show("a")["state"] in ("expired", "free"), 10)


def test_one_of_both_leads(db: Database) -> None:
    locks = rowlock.connect(db.url)
    terms: list[int] = []
    for lease in locks.leader("scheduler", lease=3):
        terms.append(lease.token)
        assert code(db, "run", "scheduler") == REFUSED
        if len(terms) == 2:
            break
    assert terms == sorted(set(terms))
    with running(db, "lead", "scheduler"):
        assert locks.lock("scheduler").locked()
        assert list(locks.leader("scheduler", wait=0)) == []
    for lease in locks.leader("scheduler"):
        assert lease.token > terms[-1]
        break
