"""Runs workers that add to a counter under one lock, and keeps the history for the judge.

A hold reads the counter, works for 50 ms, asks the lock whether it still stands if the lock has
such a question, and writes the counter 50 ms later, as if the write were under way for so long.
First the holder is stopped for longer than the lease, after its question and before it in turn;
then the server is restarted.

A worker writes its events as lines of JSON: `ask`; `got`; `checked`, after the question; `left`, if
only a commit follows; and `done` with the value, `refused` or `unknown`.
"""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import plan
from fleet import Fleet, Log
from jobs import prepare, restart
from servers import Missing, Postgres, Redis

LEASE = 5
PAUSE = 12
EACH_PAUSE = 18   # one pause, and what follows it
EACH_RESTART = 12
WARM_UP = 5
COUNTER = """
CREATE TABLE chaos_counter (id int PRIMARY KEY, n bigint NOT NULL, token bigint NOT NULL);
INSERT INTO chaos_counter VALUES (1, 0, 0)"""


def last_event(path):
    """The last event in a worker's log, which is written event by event."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 4096))
        lines = [line for line in file.read().split(b"\n") if line.startswith(b'{"event"')]
    return json.loads(lines[-1])["event"] if lines else None


def pause_holder(fleet, folder, when, log):
    """Stops a worker that holds the lock, at this event. Others are continued at once."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for instance in fleet.instances:
            path = f"{folder}/instance-{instance.place}.log"
            if not instance.free() or last_event(path) != when:
                continue
            instance.process.send_signal(signal.SIGSTOP)
            if last_event(path) == when:
                instance.paused_until = time.monotonic() + PAUSE
                log.add("stop", instance.name, when=when)
                return
            instance.process.send_signal(signal.SIGCONT)
        time.sleep(0.005)
    log.add("no_holder")


def events_of(path):
    events = []
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(b'{"event"'):
                events.append(json.loads(line))
    return events


def run_locks(peer, name, folder, minutes, seed, say):
    """The history of one way to lock, which is one of the peer's."""
    settings = peer.settings["locks"]
    way = settings["ways"][name]
    folder = Path(folder).resolve()
    rounds = max(1, min(5, round(minutes / 2)))
    chance = random.Random(seed)
    servers, over, fleet = [], threading.Event(), None
    log = Log(folder / "faults.jsonl")
    try:
        if settings.get("redis"):
            servers.append(Redis(str(folder / "redis"), folder / "redis.log"))
        else:
            servers.append(Postgres(str(folder / "postgres"), folder / "postgres.log"))
        server = servers[0]
        server.start()
        if not settings.get("redis"):
            server.psql("CREATE EXTENSION pg_stat_statements")
            server.psql(COUNTER)
        url = "REDIS_URL" if settings.get("redis") else "DATABASE_URL"
        env = {url: server.url, "CHAOS_LEASE": str(LEASE)}
        prepare(peer, peer.place, settings, env)
        fleet = Fleet(peer.argv(way), env, peer.place, folder, log, plan.INSTANCES)
        wait(fleet, WARM_UP)
        say(f"{name}: {rounds} pauses and {rounds} restarts begin")
        for turn in range(rounds):
            wait(fleet, 2 + chance.random())
            pause_holder(fleet, folder, "checked" if turn % 2 == 0 else "got", log)
            wait(fleet, EACH_PAUSE - 3)
        split = time.time()
        for turn in range(rounds):
            wait(fleet, 2 + chance.random())
            up = threading.Event()
            how = "fast" if turn % 2 == 0 else "crash"
            threading.Thread(target=restart, args=(servers, how, log, up, over),
                             daemon=True).start()
            wait(fleet, EACH_RESTART - 3)
            if not up.wait(60):
                raise Missing(f"the server did not start again: see {folder}")
        fleet.stop()
    finally:
        if fleet:
            fleet.stop()
        for server in servers:
            server.stop(server.gently)
        over.set()
    workers = [{"name": instance.place, "events": events_of(instance.output.name)}
               for instance in fleet.instances]
    if not any(event["event"] == "done" for worker in workers for event in worker["events"]):
        raise Missing(f"no worker ever wrote under the lock: see the logs in {folder}")
    history = {"lock": name, "seed": seed, "split": split, "workers": workers,
               "faults": log.entries}
    (folder / "history.json").write_text(json.dumps(history))
    return history


def wait(fleet, seconds):
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        fleet.look()
        time.sleep(min(0.02, left))
