"""Settings of a session: isolation levels, and limits to how long a statement runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pymysql
import pytest
from conftest import MYSQL, POSTGRES, Database, acquired, end_sessions, refused
from test_functions import call

import rowlock
import rowlock.aio
from rowlock.postgres import LOOK
from rowlock.protocol import Call, Change, Steps

LOCK = "SELECT 1 FROM t_resource_lock FOR UPDATE"
ASK = ("rowlock_try_acquire", "k", 30, None, None, None, None)


def session(db: Database, *statements: str, autocommit: bool = False) -> Any:
    connection = db.connect()
    connection.autocommit(autocommit)
    for statement in statements:
        connection.cursor().execute(statement)
    return connection


def renewed(lease: rowlock.Lease) -> str:
    """The reply to a renewal that is sent over the session of the lock's requests."""

    def steps() -> Steps[str]:
        (outcome,) = yield Call("renew", [Change(lease.claim, 60.0)])
        return str(outcome)

    outcome: str = lease._on.ask(steps(), 60.0).result(30)
    return outcome


@contextmanager
def locked(db: Database) -> Generator[None, None, None]:
    """Another transaction has locked each row."""
    connection = db.connect()
    connection.cursor().execute(LOCK)
    yield
    connection.rollback()
    connection.close()


def isolation(level: str) -> str:
    return f"SET SESSION TRANSACTION ISOLATION LEVEL {level}"


@MYSQL
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_call_in_autocommit_locks_and_waits_for_nothing(db: Database, level: str) -> None:
    with rowlock.lock(db.url, "k", lease=60) as lease:
        claim = lease.claim
        one = session(db, isolation(level), autocommit=True)
        for asked in (ASK, ("rowlock_list",)):
            call(one, *asked)
            assert renewed(lease) == "done"
        with locked(db):
            assert call(one, *ASK)[6] == "held"
            named = ("k", claim.holder, claim.token)
            assert call(one, "rowlock_renew", *named, None)[0] == "busy"
            assert call(one, "rowlock_abandon", *named)[0] == "busy"
        one.close()


@MYSQL
def test_a_call_in_a_serializable_transaction_locks_and_waits(db: Database) -> None:
    """As the page says: InnoDB makes each read of such a transaction a locking one."""
    with rowlock.lock(db.url, "k", lease=60) as lease:
        claim = lease.claim
        for read in (ASK, ("rowlock_list",)):
            one = session(db, isolation("SERIALIZABLE"))
            call(one, *read)
            assert renewed(lease) == "busy"
            one.rollback()
            assert renewed(lease) == "done"
            one.close()
        named = ("k", claim.holder, claim.token)
        changes = (("rowlock_renew", *named, None), ("rowlock_confirm", *named))
        for asked in (ASK, *changes):
            one = session(db, isolation("SERIALIZABLE"), "SET innodb_lock_wait_timeout = 1")
            with locked(db), pytest.raises(pymysql.OperationalError, match="Lock wait timeout"):
                call(one, *asked)
            one.close()
        # Beside no other transaction it confirms, and the row is locked as at each level.
        one = session(db, isolation("SERIALIZABLE"))
        lease.confirm(one.cursor())
        assert renewed(lease) == "busy"
        one.commit()
        one.close()


@MYSQL
def test_a_lost_confirmation_ends_no_transaction(db: Database) -> None:
    """As the page says: the caller rolls back, or its work is committed without the claim."""
    db.execute("CREATE TABLE work (token BIGINT)")
    lease = acquired(rowlock.try_acquire(db.url, "k"))
    lease.release()
    one = session(db)
    for end, rows in ((one.rollback, 0), (one.commit, 1)):
        with pytest.raises(rowlock.Lost):
            lease.confirm(one.cursor())
        one.cursor().execute("INSERT INTO work VALUES (7)")
        end()
        assert len(db.execute("SELECT token FROM work")) == rows
    one.close()


@POSTGRES
def test_a_lost_confirmation_ends_the_transaction(db: Database) -> None:
    db.execute("CREATE TABLE work (token BIGINT)")
    lease = acquired(rowlock.try_acquire(db.url, "k"))
    lease.release()
    one = db.connect()
    with pytest.raises(rowlock.Lost):
        lease.confirm(one.cursor())
    with pytest.raises(Exception, match="current transaction is aborted"):
        one.cursor().execute("INSERT INTO work VALUES (7)")
    one.commit()
    one.close()
    assert db.execute("SELECT token FROM work") == []


@POSTGRES
def test_a_statement_timeout_undoes_a_call_and_is_no_refusal(db: Database) -> None:
    """A limit below the time for which a call tries a locked row, and for which it may commit."""
    name = db.url.rsplit("/", 1)[1]
    with rowlock.lock(db.url, "k", lease=60) as lease:
        db.execute(f"ALTER DATABASE {name} SET statement_timeout = '60ms'")
        with locked(db):
            one = db.connect()
            with pytest.raises(Exception, match="statement timeout"):
                one.execute(f"SELECT rowlock_release('k', '{lease.claim.holder}', {lease.token})")
            one.close()
    end_sessions(db.url)
    # The client's own: a claim is repeated while it may wait.
    with locked(db), pytest.raises(rowlock.Unavailable, match="statement timeout"):
        rowlock.try_acquire(db.url, "k")
    other = db.connect()
    other.execute("SET statement_timeout = 0")
    other.execute(LOCK)
    began = time.monotonic()
    threading.Timer(1.0, other.rollback).start()
    with rowlock.lock(db.url, "k", wait=60):
        assert time.monotonic() - began > 0.9
    other.close()


@POSTGRES
def test_each_of_several_renewals_is_told_what_became_of_its_row(db: Database) -> None:
    leases = [acquired(rowlock.try_acquire(db.url, key, lease=60)) for key in "abcd"]
    renewals = [Change(lease.claim, 60.0) for lease in leases]
    db.execute("DELETE FROM t_resource_lock WHERE key_resource = 'a'")
    db.execute("UPDATE t_resource_lock SET token = token + 1 WHERE key_resource = 'b'")
    other = db.connect()
    other.execute("SELECT 1 FROM t_resource_lock WHERE key_resource = 'c' FOR UPDATE")

    def steps() -> Steps[list[str]]:
        outcomes: list[str] = yield Call("renew", renewals)
        return outcomes

    outcomes = leases[0]._on.ask(steps(), 60.0).result(30)
    assert outcomes == ["lost", "lost", "busy", "done"]
    other.rollback()
    other.close()
    for lease in leases[2:]:
        lease.release()


@POSTGRES
def test_what_a_claim_rests_on_waits_for_the_disk(db: Database) -> None:
    """Whatever the role commits like. A trigger records how at the commit."""
    name = db.url.rsplit("/", 1)[1]
    db.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    db.execute("CREATE TABLE committed (place bigserial, how text)")
    db.execute("""
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO committed (how) VALUES (current_setting('synchronous_commit'));
    RETURN NULL;
END $$""")
    db.execute("""
CREATE CONSTRAINT TRIGGER note AFTER UPDATE ON t_resource_lock DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION note()""")
    for source in (db.url, db.connect):
        lease = acquired(rowlock.try_acquire(source, "k", lease=60))
        assert renewed(lease) == "done"
        lease.release()
    both = acquired(rowlock.connect(db.url).lock_all(["k", "l"]).acquire())
    both.release()
    rows = db.execute("SELECT how FROM committed ORDER BY place")
    assert len(rows) >= 10  # A machine that stands still for a while may see further renewals.
    assert set(rows) == {("on",)}


@POSTGRES
def test_a_look_waits_for_a_standby(db: Database) -> None:
    """As a commit does, if the role commits asynchronously. Else it could be one of the past."""
    connection = db.connect()
    connection.execute("SET synchronous_commit = off")
    connection.execute(LOOK, ("k", "k"))
    assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
    connection.rollback()
    connection.execute("SET synchronous_commit = local")
    connection.execute(LOOK, ("k", "k"))
    assert connection.execute("SHOW synchronous_commit").fetchone() == ("local",)
    connection.close()


@POSTGRES
@pytest.mark.parametrize(
    "setting",
    [
        "datestyle = 'German'",
        "client_encoding = 'SQL_ASCII'",
        "timezone = 'Asia/Kathmandu'",
        "intervalstyle = 'sql_standard'",
        "extra_float_digits = -15",
        "default_transaction_isolation = 'serializable'",
        "standard_conforming_strings = off",
    ],
)
def test_settings_of_the_role_change_no_reply(db: Database, setting: str) -> None:
    name = db.url.rsplit("/", 1)[1]
    db.execute(f"ALTER DATABASE {name} SET {setting}")
    key, label = "an 'ä' \\", "von ü"
    now = datetime.now(timezone.utc)
    with rowlock.lock(db.url, key, lease=60, label=label) as lease:
        for source in (db.url, db.connect):
            refusal = refused(rowlock.try_acquire(source, key))
            assert (refusal.reason, refusal.by) == ("held", label)
            assert refusal.since is not None
            assert abs(refusal.since - now) < timedelta(seconds=30)
            assert refusal.until is not None
            assert abs(refusal.until - refusal.since - timedelta(seconds=60)) < timedelta(seconds=1)
            assert refusal.retry_after is not None
            assert 20 < refusal.retry_after < 70
        assert renewed(lease) == "done"

        async def ask() -> rowlock.aio.Lease | rowlock.Refusal:
            return await rowlock.aio.try_acquire(db.url, key)

        asked = asyncio.run(ask())
        assert isinstance(asked, rowlock.Refusal)
        assert (asked.reason, asked.by, asked.since) == ("held", label, refusal.since)
    assert db.show(key)["status"] == "S"


@MYSQL
def test_a_limit_to_statements_of_mysql_is_waited_out(db: Database) -> None:
    """On MySQL it does not concern procedures; MariaDB ends the call with error 1969."""
    limits = {"mysql": "max_execution_time = 50", "mariadb": "max_statement_time = 0.05"}

    def connect() -> Any:
        return session(db, f"SET SESSION {limits[db.name]}")

    with rowlock.lock(db.url, "k"):
        pass
    other = session(db, LOCK)
    if db.name == "mysql":
        assert refused(rowlock.try_acquire(connect, "k")).reason == "busy"
    began = time.monotonic()
    threading.Timer(1.0, other.rollback).start()
    with rowlock.lock(connect, "k", wait=60):
        assert time.monotonic() - began > 0.9
    other.close()
