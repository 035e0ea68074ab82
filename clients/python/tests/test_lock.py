"""What the client promises, on each database and beside the program."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from datetime import timedelta
from typing import Any

import pytest
from conftest import Database, acquired, eventually, refused

import rowlock
import rowlock.aio


def test_a_key_is_held_for_the_block(db: Database) -> None:
    with rowlock.lock(db.url, "k", label="python") as lease:
        refusal = refused(rowlock.try_acquire(db.url, "k"))
        assert (refusal.reason, refusal.by) == ("held", "python")
        assert refusal.until is not None
        assert refusal.retry_after is not None
        assert 20 < refusal.retry_after <= 30
        assert db.run("acquire", "k").returncode == 75
        with pytest.raises(rowlock.Refused, match=r"held, by python") as raised:
            rowlock.lock(db.url, "k").__enter__()
        assert not raised.value.refusal
        assert not lease.lost
        assert 25 < lease.time_left < 30
    assert lease.time_left == 0
    with pytest.raises(rowlock.Lost, match="was ended"):
        lease.check()
    shown = db.show("k")
    assert (shown["state"], shown["status"], shown["token"]) == ("free", "S", lease.token)


def test_the_end_of_the_block_says_how_the_work_ended(db: Database) -> None:
    with pytest.raises(KeyError), rowlock.lock(db.url, "k"):
        raise KeyError
    assert db.show("k")["state"] == "failed"
    with (
        pytest.raises(rowlock.Refused, match="last run failed"),
        rowlock.lock(db.url, "k", rules="article"),
    ):
        pass
    with pytest.raises(KeyboardInterrupt), rowlock.lock(db.url, "k"):
        raise KeyboardInterrupt
    assert db.show("k")["state"] == "expired"
    with rowlock.lock(db.url, "k") as lease:
        assert lease.taken_over_from is not None
    refusal = refused(rowlock.try_acquire(db.url, "k", min_interval=3600))
    assert refusal.reason == "within_min_interval"
    with pytest.raises(rowlock.Lost):
        lease.release()


def test_tokens_grow_across_languages(db: Database) -> None:
    tokens = []
    for _ in range(3):
        with rowlock.lock(db.url, "k") as lease:
            tokens.append(lease.token)
        claim = db.acquire("k")
        tokens.append(claim["token"])
        assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"
        assert db.run("release", "k", "--holder", claim["holder"]).returncode == 0
    assert tokens == sorted(set(tokens))


def test_a_lease_is_renewed_and_its_loss_is_told(db: Database) -> None:
    lease = acquired(rowlock.try_acquire(db.url, "k", lease=6))
    time.sleep(7)
    assert not lease.lost
    assert db.run("acquire", "k").returncode == 75
    assert db.run("release", "k", "--force").returncode == 0
    eventually(lambda: lease.lost)
    with pytest.raises(rowlock.Lost, match="seen without the claim"):
        lease.check()
    with pytest.raises(rowlock.Lost), lease:
        pass


def test_a_claim_that_another_program_has_overwritten_is_lost(db: Database) -> None:
    """A program that knows the article's columns alone leaves the holder and the token."""
    for overwritten in ("end_time = begin_time", "begin_time = NULL", "lock_flag = 0"):
        lease = acquired(rowlock.try_acquire(db.url, overwritten, lease=4))
        db.execute(f"UPDATE t_resource_lock SET {overwritten} WHERE key_resource = '{overwritten}'")
        eventually(lambda held=lease: held._state.why_lost is not None)
        with pytest.raises(rowlock.Lost, match="seen without the claim"):
            lease.check()


def test_a_claim_of_a_killed_program_is_taken_over(db: Database) -> None:
    killed = db.start("run", "k", "--lease", "2s", "--label", "rust", "--", "sleep", "1000")
    eventually(lambda: db.run("list", "--claimed").stdout.count("rust") == 1)
    killed.kill()
    killed.wait()
    with rowlock.lock(db.url, "k", wait=30) as lease:
        assert lease.taken_over_from is not None
        assert lease.taken_over_from.label == "rust"
        assert lease.token > lease.taken_over_from.token


def test_a_commit_depends_on_the_claim(db: Database) -> None:
    db.execute("CREATE TABLE work (token BIGINT)")
    lease = acquired(rowlock.try_acquire(db.url, "k"))
    connection = db.connect()
    cursor = connection.cursor()
    lease.confirm(cursor)
    cursor.execute(f"INSERT INTO work VALUES ({lease.token})")
    if db.name != "sqlite":
        # The row stays locked: nothing takes the key before the commit.
        assert db.run("list").returncode == 0
        db_refusal = rowlock.try_acquire(db.url, "k")
        assert not db_refusal
    connection.commit()
    assert db.run("release", "k", "--force").returncode == 0
    with pytest.raises(rowlock.Lost):
        lease.confirm(cursor)
    connection.rollback()
    connection.close()
    assert [row[0] for row in db.execute("SELECT token FROM work")] == [lease.token]
    eventually(lambda: lease.lost or lease.time_left < 25)
    with pytest.raises(rowlock.Lost):
        lease.release()


def test_a_confirmation_needs_a_transaction(db: Database) -> None:
    with rowlock.lock(db.url, "k") as lease:
        connection = db.connect()
        if isinstance(connection, sqlite3.Connection):
            connection.isolation_level = None
        elif db.name == "postgres":
            connection.autocommit = True
        else:
            connection.autocommit(True)
        with pytest.raises(rowlock.Error, match="needs a transaction"):
            lease.confirm(connection.cursor())
        connection.close()


def test_sources(db: Database) -> None:
    connection = db.connect()
    for source in (db.url, connection, db.connect):
        with rowlock.lock(source, "k") as lease:
            assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"
        assert lease.token
    # Nothing was sent over the application's connection: it is in no transaction.
    if db.name == "postgres":
        assert connection.info.transaction_status == 0
    connection.close()


def test_a_job_returns_its_result_or_the_refusal(db: Database) -> None:
    @rowlock.job(db.url, "job", min_interval=3600)
    def report(lease: rowlock.Lease, name: str) -> str:
        return f"{name} {lease.key}"

    assert report("daily") == "daily job"
    refusal = report("daily")
    assert isinstance(refusal, rowlock.Refusal)
    assert refusal.reason == "within_min_interval"


def test_a_missing_table_is_told(db: Database) -> None:
    db.execute("DROP TABLE t_resource_lock")
    with pytest.raises(rowlock.NotInstalled, match="rowlock migrate"):
        rowlock.try_acquire(db.url, "k")


def test_a_database_that_does_not_answer_is_no_refusal() -> None:
    with pytest.raises(rowlock.Unavailable):
        rowlock.try_acquire("postgres://app@127.0.0.1:1/nothing", "k")
    with pytest.raises(rowlock.Unavailable):
        rowlock.try_acquire("sqlite:/nowhere/locks.db", "k")


@pytest.mark.parametrize("key", ["", " k", "k\u3000", "k\0", "k" * 256])
def test_a_key_is_checked_before_anything_is_sent(key: str) -> None:
    with pytest.raises(ValueError, match="is not valid"):
        rowlock.lock("sqlite:/nowhere", key)


@pytest.mark.parametrize("key", [None, 7, b"k", ["k"]])
def test_a_key_is_a_text(key: Any) -> None:
    for make in (rowlock.lock, rowlock.job, rowlock.try_acquire, rowlock.aio.lock, rowlock.aio.job):
        with pytest.raises(TypeError, match="it has to be a str"):
            make("sqlite:/nowhere", key)


@pytest.mark.parametrize(
    "bad", [{"lease": 0.05}, {"lease": 31 * 86400}, {"min_interval": -1}, {"rules": "none"}]
)
def test_terms_are_checked_before_anything_is_sent(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"valid|known"):
        rowlock.lock("sqlite:/nowhere", "k", **bad)


@pytest.mark.parametrize("name", ["lease", "wait", "min_interval"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), "1", None, True, -1.0])
def test_a_duration_is_a_finite_number(name: str, bad: Any) -> None:
    if name == "wait" and bad is None:
        pytest.skip("a wait without an end")
    for make in (rowlock.lock, rowlock.job, rowlock.aio.lock, rowlock.aio.job):
        with pytest.raises(ValueError, match=f"{name} .* is not valid"):
            make("postgres:///nowhere", "k", **{name: bad})
    if name == "wait":
        with pytest.raises(ValueError, match=r"wait .* is not valid"):
            rowlock.lock("postgres:///nowhere", "k").acquire(bad)
        with pytest.raises(ValueError, match=r"wait .* is not valid"):
            asyncio.run(rowlock.aio.lock("postgres:///nowhere", "k").acquire(bad))
    else:
        with pytest.raises(ValueError, match=f"{name} .* is not valid"):
            rowlock.try_acquire("postgres:///nowhere", "k", **{name: bad})


def test_a_duration_may_be_a_timedelta(db: Database) -> None:
    with rowlock.lock(db.url, "k", lease=timedelta(minutes=2), wait=timedelta(0)) as lease:
        assert 100 < lease.time_left < 120
    refusal = refused(rowlock.try_acquire(db.url, "k", min_interval=timedelta(hours=1)))
    assert refusal.reason == "within_min_interval"
    for bad in ({"lease": timedelta(0)}, {"wait": timedelta(-1)}, {"min_interval": timedelta(-1)}):
        with pytest.raises(ValueError, match="is not valid"):
            rowlock.lock(db.url, "k", **bad)  # type: ignore[arg-type]


def test_keys_are_data(db: Database) -> None:
    for key in ("'; DROP TABLE t_resource_lock; --", '%s ? \\ " `', "κλειδί", "🔒", "k" * 255):
        with rowlock.lock(db.url, key):
            assert db.run("acquire", key).returncode == 75


def test_sqlite_has_no_functions_to_install(db: Database) -> None:
    done = db.run("migrate", "--functions")
    if db.name == "sqlite":
        assert done.returncode == 78
        assert "no stored functions" in done.stderr
    else:  # They are replaced, as often as one likes.
        assert done.returncode == 0, done.stderr
