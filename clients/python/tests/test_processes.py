"""Processes in two languages on the same keys: killed, paused, and many at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from conftest import Database, program

WORKER = str(Path(__file__).parent / "worker.py")
LEASE = 4.0

#: As a shell script does it, with the program: the counter and the tokens of one key.
SCRIPT = """
file=$1/$ROWLOCK_KEY
read -r number < "$file"
sleep 0.00$((RANDOM % 5))
echo $((number + 1)) > "$file"
echo "$ROWLOCK_TOKEN" >> "$file.tokens"
"""
#: `rowlock run` ends with 75 where it is refused: never here, as each waits long enough.
ROUNDS = """
for ((round = 0; round < $2; round++)); do
    key=a; ((RANDOM % 2)) && key=b
    "$3" run "$key" --wait 120s --lease 20s -- bash -c "$4" - "$1" || exit
done
"""


def worker(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, WORKER, *arguments], stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[Any]) -> list[str]:
    assert process.stdout is not None
    words: list[str] = process.stdout.readline().split()
    return words


def test_a_killed_process_is_replaced_by_a_program(db: Database) -> None:
    killed = worker("hold", db.url, "k", str(LEASE))
    token = int(line(killed)[1])
    assert db.run("acquire", "k").returncode == 75
    killed.kill()
    killed.wait()
    claim = db.acquire("k", "--wait", "30s")
    assert claim["taken_over_from"] == {"token": token, "by": "python"}
    assert claim["token"] > token


def test_a_paused_process_is_replaced_and_told(db: Database) -> None:
    paused = worker("hold", db.url, "k", str(LEASE))
    token = int(line(paused)[1])
    paused.send_signal(signal.SIGSTOP)
    try:
        claim = db.acquire("k", "--wait", "30s", "--lease", "60s")
    finally:
        paused.send_signal(signal.SIGCONT)
    assert claim["taken_over_from"]["token"] == token
    assert line(paused)[0] == "lost"
    # The block ends, and its end reports the loss; the new claim is untouched.
    assert paused.wait() != 0
    assert db.show("k")["token"] == claim["token"]


def test_a_loss_is_told_before_another_claim_is_granted(db: Database) -> None:
    """The table is out of reach for renewals, as after an outage: their row stays locked."""
    if db.name == "sqlite":
        lock = "UPDATE t_resource_lock SET status = status WHERE key_resource = 'k'"
    else:
        lock = "SELECT 1 FROM t_resource_lock WHERE key_resource = 'k' FOR UPDATE"
    holder = worker("hold", db.url, "k", str(LEASE))
    assert line(holder)[0] == "held"
    connection = db.connect()
    connection.cursor().execute(lock)
    lost = line(holder)
    connection.rollback()
    connection.close()
    claim = db.acquire("k", "--wait", "30s")
    assert lost[0] == "lost"
    # The new claim's token is the database's clock, which is this machine's.
    told = time.time() - (time.monotonic() - float(lost[1]))
    assert told < claim["token"] / 1_000_000
    holder.wait()


def test_two_languages_count_exactly(db: Database, tmp_path: Path) -> None:
    processes, rounds = 8, 6
    for key in ("a", "b"):
        (tmp_path / key).write_text("0\n")
    running: list[subprocess.Popen[str]] = []
    for _ in range(processes):
        running.append(worker("count", db.url, str(tmp_path), str(rounds)))
        arguments = ["bash", "-c", ROUNDS, "-", str(tmp_path), str(rounds), program(), SCRIPT]
        running.append(subprocess.Popen(arguments, env=db.environment(), text=True))
    assert [process.wait() for process in running] == [0] * len(running)
    counted = 0
    for key in ("a", "b"):
        number = int((tmp_path / key).read_text())
        tokens = [int(text) for text in (tmp_path / f"{key}.tokens").read_text().split()]
        assert len(tokens) == number
        assert tokens == sorted(set(tokens))
        counted += number
    assert counted == 2 * processes * rounds
