"""The recipes of `docs/python.md` and `python-frameworks.md`, run as they stand."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import POSTGRES, Database

import rowlock

DOCS = Path(__file__).parents[3] / "docs"
PAGES = "\n".join((DOCS / name).read_text() for name in ("python.md", "python-frameworks.md"))


def recipe(name: str) -> str:
    found = re.search(rf"<!-- recipe: {name} -->\n```\w+\n(.*?)```\n", PAGES, re.DOTALL)
    assert found, name
    return found[1]


def run(db: Database, program: str, **options: Any) -> str:
    """Runs a program in a process of its own, and returns what it says."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, "-c", program],
        env=db.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_recipe_is_run_here() -> None:
    page, tests = PAGES, Path(__file__).read_text()
    names = re.findall(r"<!-- recipe: ([\w-]+) -->", page)
    assert len(names) == page.count("```python")
    assert [name for name in names if f'recipe("{name}")' not in tests] == []


def test_python(db: Database) -> None:
    said = run(db, recipe("python"))
    assert "under fencing token" in said
    assert "not now: within_min_interval" in said
    assert "step 2" in said


@POSTGRES
def test_confirm(db: Database) -> None:
    run(db, recipe("python-confirm"))
    token = db.show("report")["token"]
    assert db.execute("SELECT token FROM report") == [(token,)]
    # The key is freed by an operator between the claim and the confirmation: nothing is written.
    freed = recipe("python-confirm").replace(
        "        lease.confirm(cursor)",
        "        import subprocess\n"
        f"        subprocess.run({[*program(), 'release', 'report', '--force']!r}, check=True)\n"
        "        lease.confirm(cursor)",
    )
    with pytest.raises(AssertionError, match=r"rowlock\.errors\.Lost"):
        run(db, freed)
    assert db.execute("SELECT token FROM report") == [(token,)]


def program() -> list[str]:
    from conftest import program

    return [program()]


def test_asyncio(db: Database) -> None:
    said = run(db, recipe("python-asyncio"))
    assert "importing under token" in said
    assert "report of 2026-11-27 under token" in said
    assert db.show("report-2026-11-27")["status"] == "S"


#: What a project of Django has around the recipe.
DJANGO = """
import os, sys
import django
from django.conf import settings

settings.configure(USE_TZ=True, DATABASES={"default": json_settings})
django.setup()
"""


def test_django(db: Database) -> None:
    from test_frameworks import django_settings

    pytest.importorskip("django")
    before = DJANGO.replace("json_settings", repr(django_settings(db)))
    if db.name in ("mysql", "mariadb"):
        pymysql = "import pymysql\npymysql.version_info = (2, 2, 1, 'final', 0)\n"
        before = f"{pymysql}pymysql.install_as_MySQLdb()\n{before}"
    db.execute("CREATE TABLE closed (day VARCHAR(10))")
    recipe_ = recipe("python-django")
    assert run(db, f"{before}{recipe_}\nprint(close_the_day('2026-11-27'))") == "True\n"
    assert [tuple(row) for row in db.execute("SELECT day FROM closed")] == [("2026-11-27",)]
    with rowlock.lock(db.url, "close-2026-11-28"):
        refused = run(db, f"{before}{recipe_}\nlocks.lock('x')\nprint(close_the_day('2026-11-28'))")
    assert refused == "False\n"
    assert len(db.execute("SELECT day FROM closed")) == 1
    assert db.show("close-2026-11-27")["status"] == "S"
    # As under ATOMIC_REQUESTS: its transaction would commit after the release.
    inside = "with transaction.atomic():\n    close_the_day('2026-11-29')"
    with pytest.raises(AssertionError, match="RuntimeError: A durable atomic block"):
        run(db, f"{before}{recipe_}\n{inside}")
    assert len(db.execute("SELECT day FROM closed")) == 1


def test_fastapi(db: Database) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    said = run(
        db,
        recipe("python-fastapi")
        + "\nfrom fastapi.testclient import TestClient\n"
        + "import json\n"
        + "with TestClient(app) as client:\n"
        + "    first = client.post('/rebuild/a')\n"
        + "    with rowlock.lock(os.environ['DATABASE_URL'], 'rebuild-b', label='other'):\n"
        + "        second = client.post('/rebuild/b')\n"
        + "print(json.dumps([first.status_code, first.json(), second.status_code, second.json()]))",
    )
    ok, first, conflict, second = json.loads(said)
    assert (ok, conflict) == (200, 409)
    assert first["token"] == db.show("rebuild-a")["token"]
    assert "held, by other" in second["detail"]


def test_celery(db: Database) -> None:
    pytest.importorskip("celery")
    said = run(
        db,
        recipe("python-celery")
        + "\nimport json\n"
        + "from celery.contrib.testing.worker import start_worker\n"
        + "with start_worker(app, perform_ping_check=False, shutdown_timeout=60):\n"
        + "    done = report.delay('2026-11-27').get(timeout=60)\n"
        + "    with locks.lock('report-2026-11-28', label='other'):\n"
        + "        refused = report.delay('2026-11-28').get(timeout=60)\n"
        + "print(json.dumps([done, refused]))",
    )
    done, refused = json.loads(said.splitlines()[-1])
    assert done == "report of 2026-11-27"
    assert (refused["key"], refused["reason"], refused["by"]) == (
        "report-2026-11-28",
        "held",
        "other",
    )
    assert db.show("report-2026-11-27")["status"] == "S"


def test_apscheduler(db: Database, tmp_path: Path) -> None:
    pytest.importorskip("apscheduler")
    program = recipe("apscheduler").replace("time.sleep(3.5)", "input()")
    said = tmp_path / "said"
    with said.open("w") as output:
        both = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                env=db.environment(),
                stdin=subprocess.PIPE,
                stdout=output,
                text=True,
            )
            for _ in range(2)
        ]
        until = time.monotonic() + 120
        while said.read_text().count("\n") < 4 and time.monotonic() < until:
            time.sleep(0.1)
        for scheduler in both:
            scheduler.communicate("\n", timeout=60)
    ticks = sorted(int(line.split()[-1]) for line in said.read_text().splitlines())
    # Two schedulers: their ticks are at least half a second apart.
    assert len(ticks) >= 4
    assert all(late - early >= 500_000 for early, late in itertools.pairwise(ticks))


def test_types_of_a_program_that_uses_the_client(tmp_path: Path) -> None:
    """The documented idioms pass in the strict modes of mypy and pyright."""
    folder = Path(__file__).parents[1]
    consumer = str(folder / "tests" / "consumer.py")
    cache = str(tmp_path)
    checkers = [[sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, consumer]]
    modules = os.environ.get("NODE_MODULES")
    if modules:
        pyright = f"{modules}/.bin/pyright"
        checkers.append([pyright, "--pythonpath", sys.executable, "--project", str(folder)])
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import rowlock\n"
        "rowlock.connect(7)\n"
        "rowlock.lock('sqlite:x', 5)\n"
        "rowlock.lock('sqlite:x', 'k', rules='never')\n"
        "rowlock.lock('sqlite:x', 'k', leese=3)\n"
        "rowlock.try_acquire('sqlite:x', 'k').release()\n"
    )
    environment = os.environ | {"MYPYPATH": str(folder / "src")}
    for command in checkers:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert {int(line) for line in re.findall(r"wrong\.py:(\d+): error", done.stdout)} == set(
        range(2, 7)
    ), done.stdout
