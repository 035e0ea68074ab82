"""mysqlclient, where it is installed: it is built with the libraries of a MySQL or MariaDB."""

from __future__ import annotations

import functools
import sys
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import MYSQL, Database, refused
from proxy import Proxy
from test_ends import WITHOUT_FILES, run
from test_functions import HOLDER
from test_outages import within

import rowlock
from rowlock.errors import Outage
from rowlock.protocol import Granted
from rowlock.sources import place_of
from rowlock.terms import Terms

sqlalchemy: Any = pytest.importorskip("sqlalchemy")
django_utils: Any = pytest.importorskip("django.db.utils")
MySQLdb: Any = pytest.importorskip("MySQLdb", reason="mysqlclient is not installed")
pytestmark = MYSQL


def test_a_function_that_connects_with_mysqlclient(db: Database) -> None:
    connect = functools.partial(MySQLdb.connect, **parameters(db.url))
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


def test_a_confirmation_needs_a_transaction(db: Database) -> None:
    connection = MySQLdb.connect(**parameters(db.url))
    cursor = connection.cursor()
    with rowlock.lock(db.url, "k") as lease:
        connection.autocommit(True)
        with pytest.raises(rowlock.Error, match="needs a transaction"):
            lease.confirm(cursor)
        connection.begin()
        lease.confirm(cursor)
        connection.commit()
    connection.close()


def parameters(url: str) -> dict[str, Any]:
    place = urlsplit(url)
    named = {"host": place.hostname, "port": place.port, "user": place.username}
    return named | {"password": place.password or "", "database": place.path[1:]}


def of_django(url: str) -> Any:
    from django.conf import settings

    if not settings.configured:
        settings.configure(USE_TZ=True)
    place = {name.upper(): value for name, value in parameters(url).items()}
    place |= {"ENGINE": "django.db.backends.mysql", "NAME": place.pop("DATABASE")}
    handler = django_utils.ConnectionHandler({"default": place})
    return handler["default"]


@pytest.mark.parametrize("kind", ["function", "engine", "django"])
def test_a_request_to_a_silent_server_ends(db: Database, kind: str) -> None:
    proxy = Proxy(db.url)
    source: Any = functools.partial(MySQLdb.connect, **parameters(proxy.url))
    if kind == "engine":
        source = sqlalchemy.create_engine(proxy.url.replace("mysql:", "mysql+mysqldb:"))
    elif kind == "django":
        source = of_django(proxy.url)
    session = place_of(source).session()
    session.patience = 1.0
    (first,) = session.send("claim", [(Terms("first", label="x"), HOLDER)])
    assert isinstance(first, Granted)
    # A reply that comes late, but in time, is read as a whole.
    other = db.connect()
    other.cursor().execute("SELECT 1 FROM t_resource_lock FOR UPDATE")
    (second,) = session.send("claim", [(Terms("first", label="y"), HOLDER)])
    assert refused(second).reason == "busy"
    other.close()
    proxy.silent = True
    error = within(15, lambda: session.send("claim", [(Terms("second", label="x"), HOLDER)]))
    assert isinstance(error, Outage)
    assert error.sent
    # The opening of a connection has a limit too.
    error = within(15, lambda: session.send("claim", [(Terms("second", label="x"), HOLDER)]))
    assert isinstance(error, Outage)
    assert not error.sent
    session.close()


def test_the_limit_of_an_open_connection_follows_the_leases(db: Database) -> None:
    proxy = Proxy(db.url)
    session = place_of(functools.partial(MySQLdb.connect, **parameters(proxy.url))).session()
    session.patience = 60.0
    session.send("claim", [(Terms("first", label="x"), HOLDER)])
    proxy.silent = True
    session.patience = 1.0
    error = within(15, lambda: session.send("claim", [(Terms("second", label="x"), HOLDER)]))
    assert isinstance(error, Outage)
    session.close()


def test_a_request_needs_no_new_file_descriptor(db: Database) -> None:
    done = run(db, "import sys; sys.modules['pymysql'] = None" + WITHOUT_FILES)
    assert done.stdout == "extended\n", done.stderr


def test_a_url_without_pymysql(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with rowlock.lock(db.url, "k"):
        assert refused(rowlock.try_acquire(db.url, "k")).reason == "held"
