"""mysqlclient, where it is installed: it is built with the libraries of a MySQL or MariaDB."""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import Database, refused

import rowlock

MySQLdb: Any = pytest.importorskip("MySQLdb", reason="mysqlclient is not installed")
pytestmark = pytest.mark.parametrize("db", ["mysql", "mariadb"], indirect=True)


def test_a_function_that_connects_with_mysqlclient(db: Database) -> None:
    def connect() -> Any:
        url = urlsplit(db.url)
        place = {"host": url.hostname, "port": url.port, "user": url.username}
        return MySQLdb.connect(**place, password=url.password or "", database=url.path[1:])

    connection = connect()
    cursor = connection.cursor()
    with rowlock.lock(connect, "k") as lease:
        assert refused(rowlock.try_acquire(connect, "k")).reason == "held"
        lease.confirm(cursor)
        connection.commit()
    with pytest.raises(rowlock.Lost):
        lease.confirm(cursor)
    connection.close()
    with pytest.raises(TypeError, match="does not tell its password"):
        rowlock.try_acquire(connection, "k")


def test_a_url_without_pymysql(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with rowlock.lock(db.url, "k"):
        assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"
