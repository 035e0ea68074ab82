"""Sessions of psql, or of the mysql program, that call the functions: the session is a process."""

from __future__ import annotations

import random
import subprocess
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from conftest import Database
from counter import reads, writes

END = "end of the reply"


class Ended(Exception):
    """The program has ended, at a statement that failed. The message is what it wrote to stderr."""


@dataclass(frozen=True)
class Claim:
    key: str
    holder: str
    token: int


class Session:
    """The program reads statements from a pipe, and ends at the first that fails, as scripts do."""

    def __init__(self, db: Database) -> None:
        url = urlsplit(db.url)
        self._is_postgres = db.name == "postgres"
        environment = db.environment()
        if self._is_postgres:
            command = ["psql", "-XqAt", "-F", "\t", "-v", "ON_ERROR_STOP=1", db.url]
        else:
            command = ["mysql", "--no-defaults", "-NBn", f"-h{url.hostname}", f"-P{url.port}"]
            command += [f"-u{url.username}", url.path[1:]]
            environment["MYSQL_PWD"] = url.password or ""
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True
        )

    def ask(self, *statements: str) -> list[list[str]]:
        """Returns the rows of all results."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        end = f"\\echo {END}" if self._is_postgres else f"SELECT '{END}';"
        try:
            self.process.stdin.write("\n".join(f"{one};" for one in statements) + f"\n{end}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # What it wrote before its end is read below.
        rows: list[list[str]] = []
        for line in self.process.stdout:
            if line.strip() == END:
                return rows
            rows.append(line.rstrip("\n").split("\t"))
        assert self.process.stderr is not None
        raise Ended(self.process.stderr.read())

    def call(self, name: str, *arguments: str) -> str:
        call = f"{name}({', '.join(arguments)})"
        return f"SELECT * FROM {call}" if self._is_postgres else f"CALL {call}"

    def acquire(self, key: str, lease: float) -> Claim:
        """Asks again until the key is granted."""
        length = f"interval '{lease} s'" if self._is_postgres else str(lease)
        asked = self.call("rowlock_try_acquire", f"'{key}'", length, "'sql'", *["NULL"] * 3)
        while True:
            ((granted, token, holder, *_),) = self.ask(asked)
            if granted in ("t", "1"):
                return Claim(key, holder, int(token))
            time.sleep(random.uniform(0.01, 0.1))

    def read(self, key: str) -> int:
        ((number,),) = self.ask(reads(key))
        return int(number)

    def write(self, claim: Claim, number: int) -> None:
        """Commits the number if the claim is confirmed; ends otherwise."""
        confirm = self.call("rowlock_confirm", *_named(claim))
        self.ask("BEGIN", confirm, *writes(claim.key, claim.token, number, "sql"), "COMMIT")

    def release(self, claim: Claim) -> str:
        release = self.call("rowlock_release", *_named(claim), "'S'")
        while (outcome := self.ask(release)[0][0]) == "busy":
            pass
        return outcome

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def _named(claim: Claim) -> tuple[str, ...]:
    return (f"'{claim.key}'", f"'{claim.holder}'", str(claim.token))
