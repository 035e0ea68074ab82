"""A database for each test, with the table and the functions, and the program ``rowlock``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import rowlock
from rowlock import database, mysql, postgres, sources, sqlite

URLS = {"postgres": "POSTGRES_URL", "mysql": "MYSQL_URL", "mariadb": "MARIADB_URL"}

POSTGRES = pytest.mark.parametrize("db", ["postgres"], indirect=True)
MYSQL = pytest.mark.parametrize("db", ["mysql", "mariadb"], indirect=True)
SQLITE = pytest.mark.parametrize("db", ["sqlite"], indirect=True)
SERVERS = pytest.mark.parametrize("db", list(URLS), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves each test to one of its databases, by its name, unless a guarantee names it.

    So it is if each database is there, and not all tests are wanted.
    """
    if os.environ.get("ROWLOCK_ALL") or not all(map(os.environ.get, URLS.values())):
        return
    guarantees = Path(__file__).parents[3].joinpath("docs", "guarantees.md").read_text()
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        spec = getattr(item, "callspec", None)
        others = {name: at for name, at in spec.indices.items() if name != "db"} if spec else {}
        groups.setdefault(f"{item.nodeid.partition('[')[0]} {others}", []).append(item)
    left: set[pytest.Item] = set()
    for name, each in groups.items():
        if f"`{name.split('::')[-1].split()[0]}`" not in guarantees:
            left.update(each)
            left.discard(each[sum(name.encode()) % len(each)])
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=list(left))


def program() -> str:
    """The program of this repository, which `cargo build -p rowlock-cli` builds."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", Path(__file__).parents[3] / "target"))
    found = os.environ.get("ROWLOCK_PROGRAM") or shutil.which(target / "debug" / "rowlock")
    if not found:
        pytest.fail("there is no program rowlock: run `cargo build -p rowlock-cli`")
    return found


@dataclass
class Database:
    name: str
    url: str

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs the program on this database."""
        return subprocess.run(
            [program(), *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            **options,
        )

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [program(), *arguments], env=self.environment(), text=True, **options
        )

    def environment(self) -> dict[str, str]:
        return os.environ | {"DATABASE_URL": self.url}

    def acquire(self, key: str, *more: str) -> dict[str, Any]:
        """Acquires a key with the program, as a script does."""
        done = self.run("acquire", key, *more)
        assert done.returncode == 0, done.stderr
        claim: dict[str, Any] = json.loads(done.stdout)
        return claim

    def show(self, key: str) -> dict[str, Any]:
        done = self.run("show", key, "--json")
        assert done.returncode == 0, done.stderr
        shown: dict[str, Any] = json.loads(done.stdout)
        return shown

    def connect(self) -> Any:
        """A connection of the application's own, with transactions."""
        kind, connection = connected(self.url)
        if kind == "sqlite3":
            connection.isolation_level = "IMMEDIATE"
            connection.execute("PRAGMA busy_timeout = 5000")
        elif kind == "psycopg":
            connection.autocommit = False
        else:
            connection.autocommit(False)
        return connection

    def execute(self, sql: str) -> Any:
        connection = self.connect()
        cursor = connection.cursor()
        cursor.execute(sql)
        rows = cursor.fetchall() if cursor.description else None
        connection.commit()
        connection.close()
        return rows


@pytest.fixture(params=["sqlite", *URLS])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Database, None, None]:
    name: str = request.param
    if name == "sqlite":
        database = Database(name, f"sqlite:{tmp_path / 'locks.db'}")
        done = database.run("migrate")
        assert done.returncode == 0, done.stderr
        database.execute("PRAGMA journal_mode = WAL")
        yield database
        return
    server = os.environ.get(URLS[name])
    if not server:
        pytest.skip(f"{URLS[name]} is not set")
    own = f"rowlock_{uuid.uuid4().hex}"
    database = Database(name, urlsplit(server)._replace(path=f"/{own}").geturl())
    administration(server, f"CREATE DATABASE {own}")
    try:
        done = database.run("migrate", "--functions")
        assert done.returncode == 0, done.stderr
        yield database
    finally:
        force = " WITH (FORCE)" if name == "postgres" else ""
        administration(server, f"DROP DATABASE {own}{force}")


def administration(url: str, sql: str) -> None:
    _, connection = connected(url)
    connection.cursor().execute(sql)
    connection.close()


def connected(url: str) -> tuple[str, Any]:
    """A connection whose replies may take a minute, as CREATE DATABASE may on a busy disk."""
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite":
        return "sqlite3", sqlite.connect(rest)
    if scheme == "mysql":
        return "pymysql", mysql.connect(60.0, mysql.place_of(url))
    return "psycopg", postgres.connect({"conninfo": url}, autocommit=True)


def end_sessions(url: str) -> None:
    """Ends the sessions of this process: the next request opens one with the settings of then."""
    on = database.of(sources.place_of(url))
    on.close()
    eventually(lambda: not (on.requests._thread or on.renewals._thread))


def eventually(holds: Callable[..., Any], within: float = 60.0) -> None:
    """Waits until a condition holds."""
    until = time.monotonic() + within
    while not holds():
        assert time.monotonic() < until, f"not within {within} s"
        time.sleep(0.01)


def acquired(attempt: rowlock.Lease | rowlock.Refusal) -> rowlock.Lease:
    assert isinstance(attempt, rowlock.Lease), str(attempt)
    return attempt


def refused(attempt: rowlock.Lease | rowlock.Refusal) -> rowlock.Refusal:
    assert isinstance(attempt, rowlock.Refusal), str(attempt)
    return attempt
