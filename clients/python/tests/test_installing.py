"""Installing the functions: over those of another version, while they are called, and on a table
that is not usable."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
from conftest import MYSQL, POSTGRES, SERVERS, Database, acquired, refused
from test_functions import HOLDER, call, install, install_text

import rowlock
import rowlock.aio
from rowlock import functions
from rowlock.__main__ import functions as text_of
from rowlock.protocol import Change
from rowlock.sources import place_of
from rowlock.terms import Terms

DRIVERS = (psycopg.Error, pymysql.Error)
RENEWAL = Change(rowlock.Claim("k", HOLDER, 1), 30.0)
OURS = (
    "holder", "token", "expires_at", "claimed_at", "confirms", "prior_token", "prior_client_ip",
    "prior_status", "prior_begin_time", "prior_end_time",
)  # fmt: skip


def set_version(db: Database, version: int) -> None:
    if db.name == "postgres":
        db.execute(
            "CREATE OR REPLACE FUNCTION rowlock_version() RETURNS integer "
            f"LANGUAGE sql AS 'SELECT {version}'"
        )
        return
    db.execute("DROP PROCEDURE rowlock_version")
    db.execute(f"CREATE PROCEDURE rowlock_version() SELECT {version} AS version")


def version(db: Database) -> Any:
    connection = db.connect()
    row = call(connection, "rowlock_version")
    connection.close()
    return row[0]


def oid(db: Database, name: str) -> Any:
    return db.execute(f"SELECT oid FROM pg_proc WHERE proname = '{name}'")


def alter(db: Database, changes: str) -> None:
    db.execute(f"ALTER TABLE t_resource_lock {changes}")


@SERVERS
def test_the_version_is_that_of_the_files_name(db: Database) -> None:
    install(db)
    folder = "postgres" if db.name == "postgres" else "mysql"
    (file,) = (Path(__file__).parents[3] / "functions" / folder).glob("*.sql")
    assert file.name == f"{version(db)}000000_functions.sql"
    assert version(db) == functions.NEEDED


@MYSQL
def test_an_installation_that_stops_keeps_the_old_version(db: Database) -> None:
    set_version(db, 20200101)
    broken = text_of("mysql").replace("PROCEDURE rowlock_list()", "PROCEDURE rowlock_list(")
    with pytest.raises(DRIVERS, match="syntax"):
        install_text(db, broken)
    assert version(db) == 20200101


@SERVERS
def test_functions_that_are_too_old_are_told(db: Database) -> None:
    set_version(db, 20200101)
    session = place_of(db.url).session()
    for _ in range(2):  # The connection of the first request is not used for the second.
        with pytest.raises(
            rowlock.NotInstalled, match=f"20200101.*{functions.NEEDED}.*rowlock migrate --functions"
        ):
            session.send("renew", [RENEWAL])
    set_version(db, 99991231)
    with rowlock.lock(db.url, "k"):
        pass
    db.execute(f"DROP {'FUNCTION' if db.name == 'postgres' else 'PROCEDURE'} rowlock_version")
    with pytest.raises(rowlock.NotInstalled, match="rowlock migrate --functions"):
        session.send("claim", [(Terms("k", label="x"), HOLDER)])


@SERVERS
def test_the_version_is_asked_for_once(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    check = functions.FunctionSession._check

    def checked(session: functions.FunctionSession, row: Any) -> None:
        asked.append(row[0])
        check(session, row)

    monkeypatch.setattr(functions.FunctionSession, "_check", checked)
    session = place_of(db.url).session()
    for _ in range(3):
        assert session.send("renew", [RENEWAL]) == ["lost"]
    session.close()
    assert asked == [functions.NEEDED]


@POSTGRES
def test_functions_with_other_results_and_parameters_are_replaced(db: Database) -> None:
    """CREATE OR REPLACE refuses each of these."""
    kept = ("rowlock_try_acquire", "rowlock_renew", "rowlock_confirm", "rowlock_version")
    before = [oid(db, name) for name in kept]
    for old in (
        "rowlock_list() RETURNS TABLE (key text, old text) LANGUAGE sql AS $$ SELECT 'k', 'old' $$",
        "rowlock_abandon(name text, holder uuid, token bigint) RETURNS text "
        "LANGUAGE sql AS $$ SELECT 'old' $$",
        "rowlock_unmatched(change text, key text, holder uuid, token bigint DEFAULT 1) "
        "RETURNS text LANGUAGE sql AS $$ SELECT 'old' $$",
        "rowlock_release(key text, holder uuid, token bigint, status text) RETURNS integer "
        "LANGUAGE sql AS $$ SELECT 1 $$",
    ):
        db.execute(f"DROP FUNCTION {old.split('(')[0]}")
        db.execute(f"CREATE FUNCTION {old}")
    # The signatures that are compared have intervals in them.
    db.execute(f"ALTER DATABASE {db.url.rsplit('/', 1)[1]} SET IntervalStyle = 'iso_8601'")
    install(db)
    assert [oid(db, name) for name in kept] == before, "a call finds them at all times"
    lease = acquired(rowlock.try_acquire(db.url, "k"))
    assert db.execute("SELECT key, state FROM rowlock_list()") == [("k", "held")]
    abandoned = f"rowlock_abandon(key => 'k', holder => '{HOLDER}', token => 1)"
    assert db.execute(f"SELECT {abandoned}") == [("lost",)]
    lease.release()


@MYSQL
def test_a_procedure_that_is_missing_for_a_moment_is_called_again(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def replaced(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) % 2 == 0:
            install(db)

    monkeypatch.setattr("rowlock.functions.time.sleep", replaced)
    session = place_of(db.url).session()
    for missing in ("version", "renew", "unmatched"):
        db.execute(f"DROP PROCEDURE rowlock_{missing}")
        assert session.send("renew", [RENEWAL]) == ["lost"]
    assert len(pauses) == 6
    monkeypatch.setattr("rowlock.functions.time.sleep", pauses.append)
    db.execute("DROP PROCEDURE rowlock_renew")
    with pytest.raises(rowlock.NotInstalled, match="rowlock_renew"):
        session.send("renew", [RENEWAL])
    assert len(pauses) == 6 + functions.MISSING - 1


@SERVERS
def test_functions_are_called_while_they_are_replaced(db: Database) -> None:
    sql = text_of("postgres" if db.name == "postgres" else "mysql")
    installed, missed = 0, 0
    done = threading.Event()
    problems: list[BaseException] = []

    def claim(key: str) -> None:
        try:
            while not done.is_set():
                with rowlock.lock(db.url, key):
                    pass
        except BaseException as problem:
            problems.append(problem)

    callers = [threading.Thread(target=claim, args=(f"k{n}",)) for n in range(2)]
    for caller in callers:
        caller.start()
    connection = db.connect()

    def miss() -> None:
        """Calls without the client, until it has met what the client has to hide."""
        nonlocal missed
        while not done.is_set():
            try:
                call(connection, "rowlock_renew", "k", HOLDER, 1, None)
                connection.rollback()  # It reads what follows the first result, as an error.
            except pymysql.err.OperationalError as error:
                connection.rollback()  # An open transaction would hold up the installation.
                if error.args[0] != 1305:
                    raise
                missed += 1

    plain = threading.Thread(target=miss)
    plain.start()
    try:
        while installed < 10 or (db.name == "mysql" and missed == 0):
            assert plain.is_alive()
            install_text(db, sql)
            installed += 1
    finally:
        done.set()
        for thread in (plain, *callers):
            thread.join()
        connection.close()
    assert problems == []
    assert (missed > 0) == (db.name == "mysql")


NO_KEY = (
    "its column key_resource is not unique by itself; "
    "delete rows with the same key, and make it the primary key"
)


@POSTGRES
@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ("DROP CONSTRAINT t_resource_lock_pkey", NO_KEY),
        (
            "DROP CONSTRAINT t_resource_lock_pkey, ADD PRIMARY KEY (key_resource, token)",
            NO_KEY,
        ),
        (
            "ALTER key_resource TYPE char(45)",
            "its column key_resource (character(45)) does not compare byte by byte; use "
            'varchar(255) COLLATE "C"',
        ),
        (
            "ALTER begin_time DROP DEFAULT, ALTER begin_time TYPE date",
            "its column begin_time (date) does not hold what rowlock writes there; "
            "use timestamptz, NULL allowed",
        ),
        (
            "ALTER end_time TYPE text",
            "its column end_time (text) does not hold what rowlock writes there; "
            "use timestamptz, NULL allowed",
        ),
        (
            "ALTER end_time SET NOT NULL",
            "its column end_time (timestamp with time zone NOT NULL) does not hold what rowlock "
            "writes there; use timestamptz, NULL allowed",
        ),
        (
            "ALTER lock_flag DROP DEFAULT, ALTER lock_flag TYPE boolean USING false",
            "its column lock_flag (boolean) does not hold what rowlock writes there; use int",
        ),
        (
            "ALTER time TYPE numeric",
            "its column time (numeric) does not hold what rowlock writes there; use int",
        ),
        ("DROP awaited, DROP token", "t_resource_lock lacks token, awaited: run rowlock migrate"),
    ],
)
def test_an_unusable_table_of_postgres_is_refused(db: Database, changes: str, wrong: str) -> None:
    db.execute("DROP FUNCTION rowlock_list")
    alter(db, changes)
    before = oid(db, "rowlock_renew")
    with pytest.raises(psycopg.Error) as raised:
        install(db)
    assert wrong in str(raised.value)
    assert (oid(db, "rowlock_list"), oid(db, "rowlock_renew")) == ([], before)


@POSTGRES
@pytest.mark.parametrize(
    "other",
    [
        "CREATE INDEX other ON t_resource_lock (key_resource)",
        "CREATE UNIQUE INDEX other ON t_resource_lock (key_resource) WHERE token > 0",
        "ALTER TABLE t_resource_lock ADD UNIQUE (key_resource) DEFERRABLE",
    ],
)
def test_an_index_that_serves_in_place_of_the_primary_key(db: Database, other: str) -> None:
    alter(db, "DROP CONSTRAINT t_resource_lock_pkey")
    db.execute(other)
    with pytest.raises(psycopg.Error, match="is not unique by itself"):
        install(db)
    db.execute("CREATE UNIQUE INDEX ours ON t_resource_lock (key_resource)")
    install(db)


@POSTGRES
def test_a_collation_that_is_not_exact_is_refused(db: Database) -> None:
    db.execute("CREATE COLLATION lax (provider = icu, locale = 'und', deterministic = false)")
    alter(db, "ALTER key_resource TYPE varchar(255) COLLATE lax")
    with pytest.raises(psycopg.Error, match="does not compare byte by byte"):
        install(db)


def unfit(column: str, shown: str) -> str:
    use = "INT" if column in ("lock_flag", "time") else "DATETIME(6) NULL"
    return f"its column {column} ({shown}) does not hold what rowlock writes there; use {use}"


OTHER_KEY = "its primary key is not the column key_resource alone; make it that"


@MYSQL
@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ("DROP PRIMARY KEY", OTHER_KEY),
        ("DROP PRIMARY KEY, ADD PRIMARY KEY (key_resource, token)", OTHER_KEY),
        (
            "DROP PRIMARY KEY, ADD id int NOT NULL AUTO_INCREMENT PRIMARY KEY, "
            "ADD UNIQUE (key_resource)",
            OTHER_KEY,
        ),
        (
            "MODIFY key_resource varchar(255) COLLATE utf8mb4_general_ci NOT NULL",
            "its column key_resource (varchar(255) utf8mb4_general_ci) does not compare byte by "
            "byte; use VARBINARY(255)",
        ),
        (
            "MODIFY begin_time datetime NULL ON UPDATE CURRENT_TIMESTAMP",
            unfit("begin_time", "datetime ON UPDATE"),
        ),
        ("MODIFY begin_time timestamp NULL", unfit("begin_time", "timestamp")),
        ("MODIFY end_time varchar(19) NULL", unfit("end_time", "varchar(19)")),
        ("MODIFY end_time datetime NOT NULL", unfit("end_time", "datetime NOT NULL")),
        ("MODIFY lock_flag char(1) NOT NULL DEFAULT '0'", unfit("lock_flag", "char(1)")),
        ("MODIFY time decimal(10,2) NOT NULL", unfit("time", "decimal(10,2)")),
        ("ENGINE = MyISAM", "its engine (MyISAM) keeps no row locks; use InnoDB"),
        ("DROP prior_token", "t_resource_lock lacks columns that rowlock writes: run rowlock"),
    ],
)
def test_an_unusable_table_of_mysql_is_refused(db: Database, changes: str, wrong: str) -> None:
    db.execute("DROP PROCEDURE rowlock_list")
    alter(db, changes)
    with pytest.raises(pymysql.Error) as raised:
        install(db)
    assert raised.value.args[0] == 1644
    assert wrong in raised.value.args[1]
    listed = "SELECT routine_name FROM information_schema.routines WHERE routine_schema = '{}'"
    names = [row[0] for row in db.execute(listed.format(db.url.rsplit("/", 1)[1]))]
    assert "rowlock_list" not in names, "nothing was created"


@MYSQL
def test_the_tables_of_articles_are_refused_or_used(db: Database) -> None:
    """The table as it is copied: with a key that ignores case, or with times that change."""

    def create(key: str, begin_time: str) -> None:
        db.execute("DROP TABLE IF EXISTS t_resource_lock")
        db.execute(f"""
            CREATE TABLE t_resource_lock (
                key_resource varchar(45) {key} NOT NULL PRIMARY KEY,
                status char(1) NOT NULL DEFAULT '',
                lock_flag int unsigned NOT NULL DEFAULT 0,
                begin_time {begin_time},
                end_time datetime DEFAULT NULL,
                client_ip varchar(45) NOT NULL DEFAULT '',
                time int unsigned NOT NULL DEFAULT 60
            ) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_general_ci""")

    exact = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    create("", "datetime NULL")
    with pytest.raises(pymysql.Error, match=r"key_resource .* use VARBINARY"):
        install(db)
    create(exact, "timestamp NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP")
    with pytest.raises(pymysql.Error, match=r"begin_time .*timestamp ON UPDATE"):
        install(db)
    create(exact, "datetime NULL")
    with pytest.raises(pymysql.Error, match="lacks columns"):
        install(db)
    assert db.run("migrate").returncode == 0
    install(db)
    with rowlock.lock(db.url, "k"):
        assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"


@SERVERS
def test_a_missing_table_is_told_by_the_databases_own_program(db: Database) -> None:
    db.execute("DROP TABLE t_resource_lock")
    url = urlsplit(db.url)
    if db.name == "postgres":
        command = ["psql", "-Xq", "-v", "ON_ERROR_STOP=1", db.url]
    else:
        command = ["mysql", "--no-defaults", "--comments", "--delimiter=//", f"-h{url.hostname}"]
        command += [f"-P{url.port}", f"-u{url.username}", url.path[1:]]
    database = "postgres" if db.name == "postgres" else "mysql"
    printed = [sys.executable, "-m", "rowlock", "functions", database]
    sql = subprocess.run(printed, check=True, capture_output=True, text=True).stdout
    environment = db.environment() | {"MYSQL_PWD": url.password or ""}
    done = subprocess.run(command, env=environment, input=sql, capture_output=True, text=True)
    assert done.returncode != 0
    assert "the table t_resource_lock does not exist here: run rowlock migrate" in done.stderr


@MYSQL
@pytest.mark.parametrize("mode", ["ANSI,TRADITIONAL", "ORACLE", "NO_BACKSLASH_ESCAPES"])
def test_any_sql_mode_installs(db: Database, mode: str) -> None:
    if mode == "ORACLE" and db.name == "mysql":
        pytest.skip("MariaDB's")
    install_text(db, text_of("mysql"), mode)
    with rowlock.lock(db.url, "k"):
        pass
    alter(db, "ENGINE = MyISAM")
    with pytest.raises(pymysql.Error, match="keeps no row locks"):
        install_text(db, text_of("mysql"), mode)


@MYSQL
def test_the_functions_name_the_columns_that_they_read(db: Database) -> None:
    """Columns that are added to another program's table are invisible to its `SELECT *`."""
    columns = db.execute(
        "SELECT column_name, column_type FROM information_schema.columns "
        "WHERE table_schema = DATABASE() AND table_name = 't_resource_lock'"
    )
    null = {"token": "NOT NULL DEFAULT 0", "confirms": "NOT NULL DEFAULT 0"}
    changes = [
        f"MODIFY {name} {kind} {null.get(name, 'NULL')} INVISIBLE"
        for name, kind in columns
        if name in OURS
    ]
    assert len(changes) == len(OURS)
    alter(db, ", ".join(changes))
    install(db)
    connection = db.connect()
    connection.autocommit(True)
    first = call(connection, "rowlock_try_acquire", "k", 30, "first", None, None, None)
    assert first[0] == 1
    assert len(db.execute("SELECT * FROM t_resource_lock")[0]) == 7
    claim = ("k", first[2], first[1])
    assert call(connection, "rowlock_try_acquire", "k", 30, None, None, None, None)[6] == "held"
    assert call(connection, "rowlock_renew", *claim, 60)[0] == "done"
    connection.begin()
    connection.cursor().callproc("rowlock_confirm", claim)
    connection.commit()
    listed = call(connection, "rowlock_list")
    assert (listed[0], listed[1], listed[4], listed[6]) == ("k", "held", "first", first[1])
    assert call(connection, "rowlock_abandon", *claim)[0] == "done"
    second = call(connection, "rowlock_try_acquire", "k", 30, None, None, None, None)
    assert second[4:6] == (first[1], "first")
    assert call(connection, "rowlock_release", "k", second[2], second[1], "F")[0] == "done"
    assert call(connection, "rowlock_list")[1] == "failed"
    connection.close()
