"""Runs the jobs of one peer under the faults, and keeps the history for the judge."""

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import plan
from fleet import Fleet, Log
from servers import Missing, Postgres, Redis

TABLE = """
CREATE TABLE chaos_run (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job text NOT NULL,
    slot timestamptz,
    instance text NOT NULL,
    begun_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at timestamptz
)"""
ROWS = """
SELECT coalesce(json_agg(json_build_object('job', job, 'instance', instance,
    'slot', extract(epoch FROM slot), 'begun', extract(epoch FROM begun_at),
    'ended', extract(epoch FROM ended_at)) ORDER BY begun_at), '[]') FROM chaos_run"""
WORK_MS = 200
WARM_UP = 10


def restart(servers, how, log, up, over):
    """Stops the servers, leaves them down, and starts them again. Servers end with the thread that
    started them, so it lasts until all is over."""
    for server in servers:
        server.count()
    log.add("server_down", how=how)
    for server in servers:
        server.stop(server.crash if how == "crash" else server.gently)
    time.sleep(plan.DOWN)
    for server in servers:
        server.start()
    log.add("server_up")
    up.set()
    over.wait()


def prepare(peer, folder, settings, env):
    """What the peer needs once, before its instances: its tables, its schedules."""
    for command in settings.get("prepare", []):
        done = subprocess.run(peer.argv(command), cwd=folder, env={**os.environ, **env},
                              capture_output=True, text=True)
        if done.returncode:
            raise Missing(f"{command[0]} failed: {done.stderr.strip()[-400:]}")


def run_jobs(peer, folder, minutes, seed, say):
    """Ten minutes of faults, say. Returns the history."""
    settings = peer.settings["jobs"]
    grain = settings["grain"]
    seconds = minutes * 60 * (3 if grain == "minute" else 1)
    drain = 60 if minutes >= 5 else 25
    folder = Path(folder).resolve()
    database = Postgres(str(folder / "postgres"), folder / "postgres.log",
                        settings.get("preload", []))
    servers = [database]
    if settings.get("redis"):
        servers.append(Redis(str(folder / "redis"), folder / "redis.log"))
    log = Log(folder / "faults.jsonl")
    fleet, outages, over = None, [], threading.Event()
    jobs = plan.jobs(grain)
    try:
        for server in servers:
            server.start()
        database.psql("CREATE EXTENSION pg_stat_statements")
        database.psql(TABLE)
        env = {"DATABASE_URL": database.url, "CHAOS_JOBS": json.dumps(jobs),
               "CHAOS_WORK_MS": str(WORK_MS), "CHAOS_LEASE": str(plan.LEASE),
               "CHAOS_FOLDER": str(folder), "PATH": f"{database.bin}:{os.environ['PATH']}"}
        if settings.get("redis"):
            env["REDIS_URL"] = servers[1].url
        prepare(peer, peer.place, settings, env)
        places = 0 if settings.get("no_instances") else plan.INSTANCES
        fleet = Fleet(peer.argv(settings.get("run", [])), env, peer.place, folder, log, places)
        wait(fleet, time.time() + WARM_UP)
        if grain == "second" and not int(database.psql("SELECT count(*) FROM chaos_run")):
            raise Missing(f"no job ran in the first {WARM_UP} s: see the logs in {folder}")
        grid = 60 if grain == "minute" else 5
        start = (int(time.time()) // grid + 1) * grid - 0.5
        wait(fleet, start)
        for server in servers:
            server.count()
            server.counted = 0
        say(f"{peer.name}: {seconds:.0f} s of faults begin")
        for at, kind, what in plan.faults(seed, seconds):
            wait(fleet, start + at)
            if kind == "kill" and places:
                fleet.kill(what)
            elif kind == "pause" and places:
                fleet.pause(what, plan.pause_of(seconds))
            elif kind == "deploy" and places:
                fleet.deploy()
            elif kind == "restart":
                outages.append(threading.Event())
                threading.Thread(target=restart, args=(servers, what, log, outages[-1], over),
                                 daemon=True).start()
        wait(fleet, start + seconds)
        for outage in outages:
            if not outage.wait(60):
                raise Missing(f"a server did not start again: see {folder}")
        for server in servers:
            server.count()
        counted = {server.name: server.counted / seconds for server in servers}
        wait(fleet, start + seconds + drain)
        until = time.time()
        fleet.stop()
        rows = json.loads(database.psql(ROWS))
    finally:
        if fleet:
            fleet.stop()
        for server in servers:
            server.stop(server.gently)
        over.set()
    history = {"peer": peer.name, "versions": peer.versions, "seed": seed, "jobs": jobs,
               "from": start, "to": start + seconds, "drain": drain, "until": until,
               "runs": rows, "faults": log.entries, "statements": counted}
    (folder / "history.json").write_text(json.dumps(history))
    return history


def wait(fleet, until):
    while (left := until - time.time()) > 0:
        fleet.look()
        time.sleep(min(0.05, left))
