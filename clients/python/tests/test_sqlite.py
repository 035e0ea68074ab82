"""SQLite, where a claim reads, judges, and takes the row that was judged."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from conftest import SQLITE, Database

import rowlock
from rowlock import sources, sqlite
from rowlock.__main__ import table
from rowlock.protocol import Change, Granted
from rowlock.terms import Terms

pytestmark = SQLITE
ONE, TWO = "0" * 31 + "1", "0" * 31 + "2"


class Interrupted(sqlite.SqliteSession):
    """Another program changes the row before a statement, once."""

    statement = sqlite.TAKE
    between: Any = None

    def _run(self, sql: str, values: Any = ()) -> Any:
        if sql == self.statement and self.between:
            between, self.between = self.between, None
            between()
        return super()._run(sql, values)


@pytest.mark.parametrize(
    "change",
    [
        "lock_flag = 1",
        "status = 'X'",
        "begin_time = begin_time + 1000",
        "end_time = NULL",
        "holder = x'00'",
        "token = token + 1",
        "expires_at = 1",
        "claimed_at = 1",
    ],
)
def test_a_row_that_has_changed_since_it_was_judged_is_judged_anew(
    db: Database, change: str
) -> None:
    session = released(db)
    requests: list[str] = []

    def between() -> None:
        requests.append(change)
        db.execute(f"UPDATE t_resource_lock SET {change} WHERE key_resource = 'k'")

    session.between = between
    # Outside a transaction, in which the row cannot change.
    assert isinstance(session._claim(Terms("k", label="x"), TWO), rowlock.Refusal)
    assert requests == [change]
    session.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("lock_flag = 1, expires_at = NULL", "held_by_another_program"),
        ("status = 'F'", "last_run_failed"),
        ("token = token + 1000000000000", None),
        ("key_resource = 'another'", None),
    ],
)
def test_a_row_that_changes_before_the_transaction_is_judged_in_it(
    db: Database, change: str, reason: str | None
) -> None:
    """What is refused is refused before: only the rest is judged in the transaction."""
    session = released(db)
    session.statement = "BEGIN IMMEDIATE"
    session.between = lambda: db.execute(f"UPDATE t_resource_lock SET {change}")
    (reply,) = session.send("claim", [(Terms("k", rules="article", label="x"), TWO)])
    assert session.between is None
    if reason is None:
        assert isinstance(reply, Granted)
        ((token, label),) = db.execute(
            "SELECT token, client_ip FROM t_resource_lock WHERE key_resource = 'k'"
        )
        assert (token, label) == (reply.claim.token, "x")
        assert db.execute("SELECT max(token) FROM t_resource_lock")[0][0] == token
    else:
        assert isinstance(reply, rowlock.Refusal)
        assert reply.reason == reason
    session.close()


def released(db: Database) -> Interrupted:
    """A session, and a row whose claim was released."""
    session = Interrupted(lambda: sqlite.connect(db.url.removeprefix("sqlite:")))
    (first,) = session.send("claim", [(Terms("k", label="x"), ONE)])
    assert isinstance(first, Granted)
    assert session.send("release", [Change(first.claim, "S")]) == ["done"]
    return session


def test_a_file_that_another_connection_writes_to_is_busy(db: Database, tmp_path: Path) -> None:
    with rowlock.lock(db.url, "k"):
        pass
    writer = db.connect()
    writer.execute("BEGIN IMMEDIATE")
    refusal = rowlock.try_acquire(db.url, "k")
    assert isinstance(refusal, rowlock.Refusal)
    assert refusal.reason == "busy"
    writer.rollback()
    with rowlock.lock(db.url, "k"):
        pass
    assert (tmp_path / "locks.db").exists()


KEY = "TEXT    NOT NULL PRIMARY KEY"
NO_KEY = "its column key_resource is not unique by itself; delete rows with the same key, and make"


def create(db: Database, old: str, new: str) -> None:
    """Creates rowlock's table with a part of its definition replaced."""
    whole = table("sqlite").split(" STRICT")[0]
    assert old in whole
    db.execute("DROP TABLE t_resource_lock")
    db.execute(whole.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        (KEY, "TEXT NOT NULL", NO_KEY),
        (KEY, "TEXT NOT NULL UNIQUE, id INTEGER PRIMARY KEY", None),
        ("prior_end_time  INTEGER", "prior_end_time, UNIQUE (key_resource, token)", None),
        (KEY, "INTEGER NOT NULL UNIQUE", "its column key_resource (INTEGER) is not text; use TEXT"),
        (KEY, "TEXT PRIMARY KEY COLLATE NOCASE", "its column key_resource has a COLLATE clause"),
        ("begin_time      INTEGER", "begin_time REAL", "its column begin_time (REAL) does not"),
        ("end_time        INTEGER", "end_time DATETIME", None),
        ("begin_time      INTEGER", "begin_time varchar(19)", None),
        (
            "end_time        INTEGER",
            "END_TIME INTEGER NOT NULL",
            "its column end_time (INTEGER NOT NULL) does not hold what rowlock writes there; use "
            "INTEGER or DATETIME, NULL allowed",
        ),
        (
            "lock_flag       INTEGER",
            "lock_flag char(1)",
            "its column lock_flag (CHAR(1)) does not hold what rowlock writes there; use INTEGER",
        ),
        ("key_resource    TEXT", "KEY_RESOURCE TEXT", None),
        ("time            INTEGER", "time text", "its column time (TEXT) does not hold"),
    ],
)
def test_a_table_is_judged_when_it_is_opened(
    db: Database, old: str, new: str, wrong: str | None
) -> None:
    create(db, old, new)
    session = sources.place_of(db.url).session()
    for _ in range(2):  # The connection of the first request is not used for the second.
        if wrong is None:
            session.send("claim", [(Terms("k", label="x"), ONE)])
            continue
        with pytest.raises(rowlock.Error) as raised:
            session.send("claim", [(Terms("k", label="x"), ONE)])
        assert type(raised.value) is rowlock.Error
        assert f"the table t_resource_lock cannot be used: {wrong}" in str(raised.value)
    session.close()


@pytest.mark.parametrize("index", ["key_resource, token", "key_resource) WHERE (token > 0"])
def test_an_index_of_more_or_of_less_is_no_key(db: Database, index: str) -> None:
    create(db, KEY, "TEXT NOT NULL")
    db.execute(f"CREATE UNIQUE INDEX theirs ON t_resource_lock ({index})")
    db.execute("CREATE INDEX others ON t_resource_lock (key_resource)")
    with pytest.raises(rowlock.Error, match="is not unique by itself"):
        rowlock.try_acquire(db.url, "k")
    db.execute("CREATE UNIQUE INDEX ours ON t_resource_lock (KEY_RESOURCE)")
    with rowlock.lock(db.url, "k"):
        pass


def test_a_missing_column_is_no_wrong_one(db: Database) -> None:
    create(db, "prior_token     INTEGER,", "")
    with pytest.raises(rowlock.NotInstalled, match="prior_token"):
        rowlock.try_acquire(db.url, "k")


def test_a_connection_to_a_file_that_is_gone_is_closed(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[sqlite3.Connection] = []
    connect = sqlite.connect

    def deleted(file: str) -> sqlite3.Connection:
        opened.append(connect(file))
        Path(file).unlink()
        return opened[-1]

    monkeypatch.setattr(sqlite, "connect", deleted)
    with pytest.raises(rowlock.Unavailable):
        rowlock.try_acquire(db.url, "k")
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
