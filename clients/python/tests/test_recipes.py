"""The recipes of `docs/languages.md`, `functions.md` and `run.md`, run as they stand."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import POSTGRES, SERVERS, Database, program

import rowlock

DOCS = Path(__file__).parents[3] / "docs"
PAGES = "\n".join((DOCS / name).read_text() for name in ("languages.md", "functions.md", "run.md"))


def recipe(name: str) -> str:
    found = re.search(rf"<!-- recipe: {name} -->\n```\w+\n(.*?)```\n", PAGES, re.DOTALL)
    assert found, name
    return found[1]


def run(db: Database, *command: str, **variables: str) -> str:
    done = subprocess.run(
        command, env=db.environment() | variables, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needed(name: str, variable: str) -> str:
    """A folder that the variable names, or a skip: `scripts/python` provides it where it can."""
    if not os.environ.get(variable) or not shutil.which(name):
        pytest.skip(f"{variable} is not set, or there is no program {name}")
    return os.environ[variable]


def test_each_recipe_is_run_here() -> None:
    names = re.findall(r"<!-- recipe: ([\w-]+) -->", PAGES)
    tests = Path(__file__).read_text()
    assert names
    assert [name for name in names if f'recipe("{name}")' not in tests] == []


@POSTGRES
def test_psql(db: Database) -> None:
    if not shutil.which("psql"):
        pytest.skip("there is no program psql")
    script = recipe("psql")
    done = subprocess.run(["psql", "-X", db.url], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    written = [row[0] for row in db.execute("SELECT token FROM report")]
    assert written == [db.show("report")["token"]]
    with rowlock.lock(db.url, "report"):
        done = subprocess.run(["psql", "-X", db.url], input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert len(db.execute("SELECT token FROM report")) == 1
    db.execute("ALTER TABLE report ADD CHECK (token < 0) NOT VALID")
    done = subprocess.run(["psql", "-X", db.url], input=script, capture_output=True, text=True)
    assert done.returncode == 3, done.stdout + done.stderr
    assert db.show("report")["state"] == "held"


@POSTGRES
def test_node(db: Database, tmp_path: Path) -> None:
    modules = needed("node", "NODE_MODULES")
    (tmp_path / "recipe.js").write_text(recipe("node"))
    said = run(db, "node", str(tmp_path / "recipe.js"), NODE_PATH=modules)
    assert "{ result: 'written' }" in said
    shown = db.show("report")
    assert (shown["state"], shown["status"]) == ("free", "S")
    with rowlock.lock(db.url, "report"):
        assert "{ refused: 'held' }" in run(
            db, "node", str(tmp_path / "recipe.js"), NODE_PATH=modules
        )


@POSTGRES
def test_node_tells_a_lost_connection_and_a_lost_claim(db: Database, tmp_path: Path) -> None:
    modules = needed("node", "NODE_MODULES")
    (tmp_path / "recipe.js").write_text(recipe("node"))
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    for key, harm in (
        ("one", f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"),
        ("two", "DELETE FROM t_resource_lock"),
    ):
        (tmp_path / "harm.js").write_text(
            "const { withKey } = require('./recipe.js');"
            "const { Client } = require('pg');"
            "const url = process.env.DATABASE_URL;"
            f"withKey(url, '{key}', 9000, async () => {{"
            "  const client = new Client({ connectionString: url });"
            f"  await client.connect(); await client.query(`{harm}`); await client.end();"
            "  await new Promise((resolve) => setTimeout(resolve, 500));"
            "}).then((value) => console.log('returned', value),"
            "        (error) => console.log('told:', error.message));"
        )
        assert "told:" in run(db, "node", str(tmp_path / "harm.js"), NODE_PATH=modules)


@POSTGRES
def test_node_begins_no_work_after_the_deadline(db: Database, tmp_path: Path) -> None:
    """The reply to the claim comes after the lease: another holder may have the key."""
    modules = needed("node", "NODE_MODULES")
    (tmp_path / "recipe.js").write_text(recipe("node"))
    (tmp_path / "late.js").write_text(
        "const { withKey } = require('./recipe.js');"
        "const { Client } = require('pg');"
        "const query = Client.prototype.query;"
        "Client.prototype.query = async function (...asked) {"
        "  const reply = await query.apply(this, asked);"
        "  await new Promise((resolve) => setTimeout(resolve, 1500));"
        "  return reply;"
        "};"
        "withKey(process.env.DATABASE_URL, 'k', 1000, async () => console.log('begun'))"
        "  .then((value) => console.log('returned', value),"
        "        (error) => console.log('told:', error.message));"
    )
    said = run(db, "node", str(tmp_path / "late.js"), NODE_PATH=modules)
    assert "told:" in said
    assert "begun" not in said


@POSTGRES
def test_node_cron(db: Database, tmp_path: Path) -> None:
    modules = needed("node", "NODE_MODULES")
    (tmp_path / "tick.js").write_text(recipe("node-cron"))
    said = run(db, "node", str(tmp_path / "tick.js"), NODE_PATH=modules)
    assert said.count("tick under token") >= 2


@POSTGRES
def test_java(db: Database, tmp_path: Path) -> None:
    driver = needed("java", "POSTGRES_JDBC")
    (tmp_path / "Recipe.java").write_text(recipe("java"))
    url = urlsplit(db.url)
    jdbc = f"jdbc:postgresql://{url.hostname}:{url.port}{url.path}?user={url.username}"
    if url.password:
        jdbc += f"&password={url.password}"
    command = ["java", "-cp", driver, str(tmp_path / "Recipe.java")]
    assert run(db, *command, JDBC_URL=jdbc).endswith("done\n")
    with rowlock.lock(db.url, "report"):
        assert "not now: held" in run(db, *command, JDBC_URL=jdbc)


@POSTGRES
def test_go(db: Database, tmp_path: Path) -> None:
    folder = os.environ.get("GO_FOLDER")
    if not folder:
        pytest.skip("GO_FOLDER is not set")
    (tmp_path / "recipe.go").write_text(recipe("go"))
    variables = {
        "GOROOT": f"{folder}/usr/lib/go-1.19",
        "GOPATH": f"{folder}/usr/share/gocode",
        "GOCACHE": f"{folder}/built",
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "DATABASE_URL": f"{db.url}?sslmode=disable",
    }
    built = str(tmp_path / "recipe")
    command = (f"{variables['GOROOT']}/bin/go", "build", "-o", built, str(tmp_path / "recipe.go"))
    run(db, *command, **variables)
    said = run(db, built, **variables)
    assert "ended: <nil>" in said
    shown = db.show("report")
    assert (shown["state"], shown["status"]) == ("free", "S")
    with rowlock.lock(db.url, "report"):
        assert "ended: refused: held" in run(db, built, **variables)


def test_shell(db: Database) -> None:
    folder = str(Path(program()).parent)
    said = run(db, "sh", "-ec", recipe("shell"), PATH=f"{folder}:{os.environ['PATH']}")
    assert "written under token" in said
    assert db.show("upload")["status"] == "S"


def test_the_package_alone_creates_the_table(db: Database) -> None:
    """As its README says, through the database's own client program."""
    for name in ("t_resource_lock", "t_resource_lock_queue"):
        db.execute(f"DROP TABLE {name}")
    with pytest.raises(rowlock.NotInstalled, match="rowlock migrate"):
        rowlock.try_acquire(db.url, "k")
    database = {"mariadb": "mysql"}.get(db.name, db.name)
    sql = run(db, sys.executable, "-m", "rowlock", "table", database)
    if db.name == "sqlite":
        with sqlite3.connect(db.url.removeprefix("sqlite:")) as connection:
            connection.executescript(sql)
    else:
        command = client(db)
        password = urlsplit(db.url).password or ""
        environment = db.environment() | {"MYSQL_PWD": password}
        subprocess.run(command, env=environment, input=sql, text=True, check=True)
    with rowlock.lock(db.url, "k") as lease:
        assert db.show("k")["token"] == lease.token


def client(db: Database, *options: str) -> list[str]:
    """The program psql or mysql, which reads SQL."""
    url = urlsplit(db.url)
    program = "psql" if db.name == "postgres" else "mysql"
    if not shutil.which(program):
        pytest.skip(f"there is no program {program}")
    if db.name == "postgres":
        return ["psql", "-Xq", "-v", "ON_ERROR_STOP=1", db.url]
    command = ["mysql", "--no-defaults", f"-h{url.hostname}", f"-P{url.port}", f"-u{url.username}"]
    return [*command, *options, url.path[1:]]


@SERVERS
def test_the_files_install_the_functions(db: Database) -> None:
    """As the page says: `psql -f`, and `mysql --comments --delimiter=//`."""
    command = client(db, "--comments", "--delimiter=//")
    kind = "FUNCTION" if db.name == "postgres" else "PROCEDURE"
    db.execute(f"DROP {kind} rowlock_try_acquire")
    with pytest.raises(rowlock.NotInstalled, match="--functions"):
        rowlock.try_acquire(db.url, "k")
    folder = "postgres" if db.name == "postgres" else "mysql"
    (file,) = (DOCS.parent / "functions" / folder).glob("*.sql")
    run(
        db,
        "sh",
        "-c",
        'exec "$@" < "$0"',
        str(file),
        *command,
        MYSQL_PWD=urlsplit(db.url).password or "",
    )
    with rowlock.lock(db.url, "k"):
        assert not rowlock.try_acquire(db.url, "k")
