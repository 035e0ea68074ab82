"""``python -m rowlock`` prints the SQL of the table, or of the lock's functions."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files


def table(database: str) -> str:
    """Returns the SQL that creates the table, or on a server completes one that exists."""
    parts = [database, "mysql_invisible"] if database == "mysql" else [database]
    folder = files("rowlock") / "table_sql"
    return "".join((folder / f"{part}.sql").read_text(encoding="utf-8") for part in parts)


def functions(database: str) -> str:
    """Returns the SQL that creates the lock's functions, or replaces those of another version."""
    return (files("rowlock") / "functions_sql" / f"{database}.sql").read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rowlock")
    commands = parser.add_subparsers(required=True, dest="command")
    printed = commands.add_parser("table", help="prints the SQL that creates the table")
    printed.add_argument("database", choices=["postgres", "mysql", "sqlite"], help="MariaDB: mysql")
    printed = commands.add_parser("functions", help="prints the SQL that creates the functions")
    printed.add_argument("database", choices=["postgres", "mysql"], help="MariaDB: mysql")
    asked = parser.parse_args()
    sys.stdout.write((table if asked.command == "table" else functions)(asked.database))


if __name__ == "__main__":
    main()
