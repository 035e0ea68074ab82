"""The functions themselves, installed as a user of the package alone does."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
from conftest import MYSQL, POSTGRES, SERVERS, Database, acquired
from pymysql.constants import CLIENT

import rowlock

HOLDER = "00000000-0000-0000-0000-000000000001"


def install(db: Database) -> None:
    database = "postgres" if db.name == "postgres" else "mysql"
    command = [sys.executable, "-m", "rowlock", "functions", database]
    install_text(db, subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def install_text(db: Database, sql: str, mode: str | None = None) -> None:
    if db.name == "postgres":
        with psycopg.connect(db.url, autocommit=True) as connection:
            connection.execute(sql.encode())
        return
    url = urlsplit(db.url)
    many: Any = pymysql.connect(
        host=url.hostname, port=url.port or 0, user=url.username, password=url.password or "",
        database=url.path[1:], client_flag=CLIENT.MULTI_STATEMENTS,
        sql_mode=mode,
    )  # fmt: skip
    with many:
        cursor = many.cursor()
        cursor.execute(sql)
        while cursor.nextset():
            pass


def call(connection: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Calls a function or a procedure, and returns the first row of its result."""
    places = ", ".join(["%s"] * len(arguments))
    cursor = connection.cursor()
    if isinstance(connection, psycopg.Connection):
        cursor.execute(f"SELECT * FROM {name}({places})", arguments)
    else:
        cursor.execute(f"CALL {name}({places})", arguments)
    row: tuple[Any, ...] = cursor.fetchone()
    while cursor.nextset():
        pass
    return row


@MYSQL
def test_a_session_that_sets_its_time_takes_no_live_claim(db: Database) -> None:
    install(db)
    with rowlock.lock(db.url, "k", lease=60) as lease:
        connection = db.connect()
        connection.cursor().execute("SET timestamp = UNIX_TIMESTAMP() + 86400 * 7")
        row = call(connection, "rowlock_try_acquire", "k", 30, None, None, None, None)
        assert (row[0], row[6]) == (0, "held")
        connection.rollback()
        connection.close()
        lease.check()
    # Nor does it end the minimum interval.
    connection = db.connect()
    connection.cursor().execute("SET timestamp = UNIX_TIMESTAMP() + 86400 * 7")
    row = call(connection, "rowlock_try_acquire", "k", 30, None, 86400, None, None)
    assert (row[0], row[6]) == (0, "within_min_interval")
    connection.rollback()
    connection.close()


@SERVERS
def test_a_repeated_claim_may_be_shorter(db: Database) -> None:
    """PyMySQL has the changed rows counted, and the drivers of other frameworks those found."""
    install(db)
    connection = db.connect()
    if db.name == "postgres":
        connection.autocommit = True
    else:
        connection.autocommit(True)
    lease = {"postgres": "{} seconds"}.get(db.name, "{}")
    asked = ("label", None, None, HOLDER)
    one = call(connection, "rowlock_try_acquire", "k", lease.format(60), *asked)
    for _ in range(2):
        two = call(connection, "rowlock_try_acquire", "k", lease.format(30), *asked)
        assert (two[0], two[1]) == (True, one[1]), two
        assert two[3] >= one[3], "it does not end earlier"
    # Not while another transaction has the row locked: its lease may be too short.
    other = db.connect()
    other.cursor().execute("SELECT 1 FROM t_resource_lock FOR UPDATE")
    row = call(connection, "rowlock_try_acquire", "k", lease.format(30), *asked)
    assert (row[0], row[6]) == (False, "busy")
    other.rollback()
    other.close()
    connection.close()


@SERVERS
def test_nulls_are_the_defaults_on_each_database(db: Database) -> None:
    install(db)
    connection = db.connect()
    asked = [None] * 5
    granted = call(connection, "rowlock_try_acquire", "k", *asked)
    connection.commit()
    token, holder = granted[1], str(granted[2])
    assert call(connection, "rowlock_renew", "k", holder, token, None)[0] == "done"
    assert call(connection, "rowlock_release", "k", holder, None, None)[0] == "lost"
    assert call(connection, "rowlock_release", "k", None, token, None)[0] == "lost"
    assert call(connection, "rowlock_release", "k", holder, token, None)[0] == "done"
    connection.commit()
    assert call(connection, "rowlock_release", "k", holder, None, None)[0] == "lost"
    connection.rollback()
    connection.close()
    assert db.show("k")["status"] == "S"


@POSTGRES
def test_functions_of_another_version_are_replaced(db: Database) -> None:
    """A call that leaves arguments out would otherwise find two functions, and fail."""
    db.execute(
        "CREATE FUNCTION rowlock_renew(key text, holder uuid, token bigint) RETURNS text "
        "LANGUAGE sql AS $$ SELECT 'old' $$"
    )
    db.execute("CREATE FUNCTION rowlock_of_the_application(key text) RETURNS text "
               "LANGUAGE sql AS $$ SELECT 'own' $$")  # fmt: skip
    install(db)
    lease = acquired(rowlock.try_acquire(db.url, "k"))
    renewed = f"SELECT rowlock_renew('k', '{lease.claim.holder}', {lease.token})"
    assert db.execute(renewed) == [("done",)]
    assert db.execute("SELECT rowlock_of_the_application('k')") == [("own",)]
    lease.release()


@SERVERS
def test_a_locked_row_is_tried_for_a_number_of_times(db: Database) -> None:
    install(db)
    with rowlock.lock(db.url, "k"):
        pass
    connection = db.connect()
    connection.cursor().execute("SELECT 1 FROM t_resource_lock FOR UPDATE")
    attempt = rowlock.try_acquire(db.url, "k")
    assert isinstance(attempt, rowlock.Refusal)
    assert attempt.reason == "busy"
    connection.rollback()
    connection.close()
    with rowlock.lock(db.url, "k"):
        pass


@MYSQL
def test_a_claim_that_waited_for_a_locked_table_has_its_whole_lease(db: Database) -> None:
    install(db)
    with rowlock.lock(db.url, "k"):
        pass
    locking, asking = db.connect(), db.connect()
    asking.autocommit(True)
    locking.cursor().execute("LOCK TABLES t_resource_lock WRITE")
    rows: list[tuple[Any, ...]] = []
    arguments = ("k", 1, "asking", None, None, None)
    claim = threading.Thread(
        target=lambda: rows.append(call(asking, "rowlock_try_acquire", *arguments))
    )
    claim.start()
    claim.join(1.5)
    assert claim.is_alive(), "the table is locked"
    locking.cursor().execute("UNLOCK TABLES")
    claim.join()
    left = "SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), %s)"
    cursor = asking.cursor()
    cursor.execute(left, (rows[0][3],))
    assert rows[0][0] == 1
    assert cursor.fetchone()[0] > 500_000
    locking.close()
    asking.close()


@MYSQL
def test_a_refusal_waits_for_no_lock_on_the_table(db: Database) -> None:
    install(db)
    lease = acquired(rowlock.try_acquire(db.url, "k"))
    locking, asking = db.connect(), db.connect()
    asking.autocommit(True)
    asking.cursor().execute(
        "SET SESSION lock_wait_timeout = 1, SESSION innodb_lock_wait_timeout = 1"
    )
    asking.cursor().execute("SET SESSION TRANSACTION READ ONLY")
    locking.cursor().execute("LOCK TABLES t_resource_lock READ")
    row = call(asking, "rowlock_try_acquire", "k", 1, "asking", None, None, None)
    assert (row[0], row[6]) == (0, "held")
    locking.cursor().execute("UNLOCK TABLES")
    lease.release()
    locking.close()
    asking.close()
