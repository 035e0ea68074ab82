"""SQLite, where a claim reads, judges, and takes the row that was judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Database

import rowlock
from rowlock import connect, sqlite
from rowlock.protocol import Granted, Terms

pytestmark = pytest.mark.parametrize("db", ["sqlite"], indirect=True)
ONE, TWO = "0" * 31 + "1", "0" * 31 + "2"


class Interrupted(sqlite.SqliteSession):
    """Another program changes the row between the judgement and the claim, once."""

    between: Any = None

    def _run(self, sql: str, values: Any) -> Any:
        if sql == sqlite.TAKE and self.between:
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
    _, open_connection = connect.opener(db.url, 30)
    session = Interrupted(open_connection)
    terms = Terms("k", label="x")
    first = session.claim(terms, ONE)
    assert isinstance(first, Granted)
    assert session.change("release", first.claim, "S") == "done"
    requests: list[str] = []

    def between() -> None:
        requests.append(change)
        db.execute(f"UPDATE t_resource_lock SET {change} WHERE key_resource = 'k'")

    session.between = between
    assert isinstance(session._attempt(terms, TWO), rowlock.Refusal)
    assert requests == [change]
    session.close()


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
